-- Reads outputs of a resumable request after an entry, and leaves word that somebody follows it. KEYS: the record, the
-- outputs. ARGV: now, last entry read ('0-0' for none), most entries.
-- Answers {rank (0: there is no record), 1 if it can be resumed, 1 if its lease has lapsed, entries}.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'rank', 'plan', 'lease', 'seen')
if not held[1] then return {0, 0, 0, {}} end
local rank, lease = tonumber(held[1]), tonumber(held[3] or 0)
if rank < 3 and now - (held[4] or 0) > 500 then redis.call('HSET', KEYS[1], 'seen', now) end
local entries = redis.call('XRANGE', KEYS[2], '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
return {rank, held[2] and 1 or 0, (rank < 3 and lease <= now) and 1 or 0, entries}
