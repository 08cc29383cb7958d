-- Says how long ago this data set took another's place. KEYS: where that is noted. ARGV: 1 where the other one was known.
-- Answers milliseconds; -1: it is the first, as far as anybody knows.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[1] == '1' then redis.call('SET', KEYS[1], now, 'NX') end
local lost = redis.call('GET', KEYS[1])
return lost and now - lost or -1
