-- Moves a request record forward. KEYS: the record. ARGV: epoch, attempt, rank, ttl in seconds, then field, value, ...
-- Ranks: 1 queued, 2 running, 3 ended. Answers 1 if written, 0 if a later or terminal record is there.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'attempt', 'rank')
local epoch, attempt, rank = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if held[1] then
  local e, a, r = tonumber(held[1]), tonumber(held[2]), tonumber(held[3])
  if r >= 3 then return 0 end
  if epoch < e or (epoch == e and (attempt < a or (attempt == a and rank < r))) then return 0 end
end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'attempt', attempt, 'rank', rank, unpack(ARGV, 5))
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
