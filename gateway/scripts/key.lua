-- Lets an idempotency key stand for its request again, in a store that came back empty. KEYS: the key's hash.
-- ARGV: request, hash of its body, ttl in seconds. Answers 1, or 0 where it stands for another request by now.
local held = redis.call('HGET', KEYS[1], 'request')
if held and held ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'hash', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
