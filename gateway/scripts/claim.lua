-- Writes the record of a resumable request, with its lease. KEYS: the record. ARGV: now, lease, budget (ms), epoch, ginc,
-- ttl in seconds, then field, value, ... Answers 1, or 0 where another owner's record is there: nothing was written.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'epoch', 'ginc')
if held[1] and held[2] ~= ARGV[5] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[4], 'ginc', ARGV[5], 'lease', now + ARGV[2], 'until', now + ARGV[3],
  unpack(ARGV, 7))
redis.call('EXPIRE', KEYS[1], ARGV[6])
return 1
