-- Ends a request whose gateway is gone. KEYS: the record, the outputs. ARGV: now, ginc of the gateway, ttl in seconds,
-- end (for the outputs). Answers {'none'}: there is no record; {'over'}: it has ended, or another gateway owns it;
-- {'parked'}: it may still be resumed; {'failed', idempotency key, worker}: ended now.
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local held = redis.call('HMGET', KEYS[1], 'epoch', 'rank', 'ginc', 'plan', 'lease', 'window', 'idem', 'worker')
if not held[1] then return {'none'} end
if tonumber(held[2]) >= 3 or held[3] ~= ARGV[2] then return {'over'} end
if held[4] then
  if held[5] + held[6] > now then return {'parked'} end
  redis.call('XADD', KEYS[2], '*', 'e', ARGV[4])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
redis.call('HSET', KEYS[1], 'epoch', held[1] + 1, 'rank', 3, 'state', 'FAILED', 'reason', 'OWNER_LOST', 'ended', now)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {'failed', held[7] or '', held[8] or ''}
