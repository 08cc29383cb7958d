-- Says that a gateway lives, and asks who does not. KEYS: the list of gateways that own requests (sorted by when they
-- were last heard). ARGV: now, ginc, silence after which one is gone (ms). Answers the incarnations that are gone.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
redis.call('ZADD', KEYS[1], now, ARGV[2])
redis.call('EXPIRE', KEYS[1], 86400)
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3], 'LIMIT', 0, 64)
