-- Appends outputs of a resumable request, and ends it where an end is given. KEYS: the record, the outputs.
-- ARGV: now, lease (ms), epoch, most bytes, ttl in seconds, entries that the owner knows to be there, runs ('' for none),
-- end ('' for none), field, value, ...
-- Answers {1, entries there are now}; {0}: another owns it; {-1}: there is no record, or not all of it, or entries that
-- were there are gone (a store that died may come back with its data as of a moment before); {-2}: the bound is reached,
-- and it can no longer be resumed.
-- Run again it appends again: who reads skips what is known.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local record, outputs, runs, ending = KEYS[1], KEYS[2], ARGV[7], ARGV[8]
local held = redis.call('HMGET', record, 'epoch', 'rank', 'bytes', 'plan')
if held[1] and held[1] ~= ARGV[3] then return {0} end
local entries = redis.call('XLEN', outputs)
if held[1] and tonumber(held[2]) >= 3 then return {1, entries} end -- the answer to its end was lost on the way
if not held[4] or entries < tonumber(ARGV[6]) then return {-1} end
local bytes = tonumber(held[3] or 0) + #runs + #ending
if bytes > tonumber(ARGV[4]) then
  redis.call('UNLINK', outputs)
  redis.call('HDEL', record, 'plan', 'lease')
  if ending ~= '' then redis.call('HSET', record, 'rank', 3, unpack(ARGV, 9)) end
  return {-2}
end
redis.call('HSET', record, 'bytes', bytes, 'lease', now + ARGV[2])
if runs ~= '' then redis.call('XADD', outputs, '*', 'r', runs) end
if ending ~= '' then
  redis.call('XADD', outputs, '*', 'e', ending)
  redis.call('HSET', record, 'rank', 3, unpack(ARGV, 9))
  redis.call('EXPIRE', record, ARGV[5])
end
redis.call('EXPIRE', outputs, ARGV[5])
return {1, redis.call('XLEN', outputs)}
