-- Makes another gateway the owner of a resumable request whose lease has lapsed. KEYS: the record.
-- ARGV: now, lease (ms), gateway, ginc. Answers {epoch, ms left of its budget}, or {0}: it has an owner, or ended.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'epoch', 'rank', 'lease', 'plan', 'until')
if not held[1] or not held[4] or tonumber(held[2]) >= 3 or tonumber(held[3]) > now then return {0} end
local epoch = held[1] + 1
redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', 1, 'rank', 1, 'state', 'QUEUED', 'gateway', ARGV[3],
  'ginc', ARGV[4], 'lease', now + ARGV[2])
return {epoch, math.max(0, held[5] - now)}
