-- Makes another gateway the owner of a resumable request whose lease has lapsed. KEYS: the record.
-- ARGV: now, lease (ms), gateway, ginc, 1 where that gateway has tried before and heard no answer: it may own it already.
-- Answers {epoch, ms left of its budget}, or {0}: it has another owner, or ended.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'epoch', 'rank', 'lease', 'plan', 'until', 'ginc')
if not held[1] or not held[4] or tonumber(held[2]) >= 3 then return {0} end
local mine = ARGV[5] == '1' and held[6] == ARGV[4]
if tonumber(held[3]) > now and not mine then return {0} end
local epoch = held[1] + 1
redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', 1, 'rank', 1, 'state', 'QUEUED', 'gateway', ARGV[3],
  'ginc', ARGV[4], 'lease', now + ARGV[2])
return {epoch, math.max(0, held[5] - now)}
