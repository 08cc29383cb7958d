-- Names this data set, and says how long ago it took another's place. KEYS: its name, when it took that place.
-- ARGV: a name, should it have none; the name of the one that was here ('': not known).
-- Answers {name, milliseconds; -1: it is the first, as far as anybody knows}.
local birth = redis.call('GET', KEYS[1])
if not birth then
  birth = ARGV[1]
  redis.call('SET', KEYS[1], birth)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] ~= '' and ARGV[2] ~= birth then redis.call('SET', KEYS[2], now, 'NX') end
local lost = redis.call('GET', KEYS[2])
return {birth, lost and now - lost or -1}
