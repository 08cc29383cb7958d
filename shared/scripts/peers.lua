-- Lists the living entries of a role. KEYS: the list. ARGV: most entries, prefix of the entries' keys.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  found[#found + 1] = redis.call('HGETALL', ARGV[2] .. id)
end
return found
