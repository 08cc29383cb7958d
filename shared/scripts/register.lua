-- Registers a process. KEYS: its entry, the list of its role. ARGV: ttl in milliseconds, id, then field, value, ...
local now = redis.call('TIME')
local until_ms = now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[1]
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], until_ms, ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
