-- Renews the lease of a resumable request, and raises its attempt where one is given. KEYS: the record.
-- ARGV: now, lease (ms), epoch, attempt (0: as it is). Answers {1, ms since a follower was last seen (-1: never)};
-- {0}: another owns it or it has ended; {-1}: there is no record, or not all of it.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'epoch', 'attempt', 'rank', 'seen', 'plan')
local attempt = tonumber(ARGV[4])
if held[1] and (held[1] ~= ARGV[3] or tonumber(held[3]) >= 3) then return {0} end
if not held[5] then return {-1} end
if attempt > 0 then
  if attempt < tonumber(held[2]) then return {0} end
  redis.call('HSET', KEYS[1], 'attempt', attempt, 'rank', 1, 'state', 'QUEUED')
end
redis.call('HSET', KEYS[1], 'lease', now + ARGV[2])
return {1, held[4] and now - held[4] or -1}
