-- Limits of one tenant: requests and tokens per minute, requests at once; for one model and for all of them ("*").
--
--   KEYS  tl:lim:{tenant}, a hash
--     r:<scope>   clock of requests     the time by which all that was taken has flowed back (GCRA)
--     t:<scope>   clock of tokens       the same; never more than a minute ahead of now
--     k:<scope>   credits               sum of what settling has set t: back by
--     n:<scope>   leases held
--     l:<request> lease                 expiry, tokens, then per scope: tpm, t: after it was taken, k: then; model
--     x           no lease expires before
--
--         tl:idem:{tenant}:<key>, a hash, where the request came with an idempotency key
--     request      the one request of this key
--     hash         of its body
--
--   ARGV  reserve now debt request ttl tokens model  rpm tpm concurrency (of the model)  rpm tpm concurrency (of all)
--           [hash, ttl of the key in seconds]
--         -> {1, requests left, until all are, tokens left, until all are}
--          | {0, limit, wait, scope, requests left, until all are, tokens left, until all are}: nothing was taken
--          | {2, request, hash}: the key belongs to another request; nothing was taken. The key is asked before limits.
--         settle now debt request used ('': in full)
--         -> {1}, or {0} where the lease is gone: it counts once
--
-- Times are whole microseconds, costs are rounded up and credits down, so that nothing is given away by rounding.
-- now = 0 takes the server's time. debt: how far ahead of now a clock starts that is not there (0: all is free).

local MINUTE = 60000000
local key, operation, now, debt = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function text(number) -- Lua's own way of writing numbers keeps 14 digits only
  return string.format('%.0f', number)
end

local function cost(amount, per_minute)
  return math.ceil(amount * MINUTE / per_minute)
end

-- Ends a lease. What it did not use goes back, but only as far as it still stands in the future of the token clock:
-- the part that lies in the past has flowed back already, and others may have taken it.
local function settle(request, lease, used)
  local numbers, model = lease:match('^([%d ]+) (.*)$')
  local field = {}
  for number in numbers:gmatch('%d+') do field[#field + 1] = tonumber(number) end
  local tokens = field[2]
  used = math.min(used or tokens, tokens)
  for place, scope in ipairs({model, '*'}) do
    local per_minute, stands_until, credits_then = field[3 * place], field[3 * place + 1], field[3 * place + 2]
    local have = redis.call('HMGET', key, 't:' .. scope, 'k:' .. scope, 'n:' .. scope)
    local clock, credits, held = tonumber(have[1]), tonumber(have[2]), tonumber(have[3])
    local unused = cost(tokens, per_minute) - cost(used, per_minute)
    local credit = math.max(0, math.min(unused, stands_until - (credits - credits_then) - now))
    redis.call('HSET', key, 't:' .. scope, text(clock - credit), 'k:' .. scope, text(credits + credit),
      'n:' .. scope, text(held - 1))
  end
  redis.call('HDEL', key, 'l:' .. request)
end

-- Ends leases whose gateway never came back; nobody knows what they used, so nothing goes back.
local function sweep()
  local expiry = tonumber(redis.call('HGET', key, 'x') or math.huge)
  if now < expiry then return expiry end
  local all, earliest = redis.call('HGETALL', key), math.huge
  for place = 1, #all, 2 do
    if all[place]:sub(1, 2) == 'l:' then
      local ends = tonumber(all[place + 1]:match('^%d+'))
      if ends <= now then
        settle(all[place]:sub(3), all[place + 1], nil)
      else
        earliest = math.min(earliest, ends)
      end
    end
  end
  if earliest < math.huge then redis.call('HSET', key, 'x', text(earliest)) else redis.call('HDEL', key, 'x') end
  return earliest
end

if operation == 'settle' then
  local lease = redis.call('HGET', key, 'l:' .. ARGV[4])
  if not lease then return {0} end
  settle(ARGV[4], lease, tonumber(ARGV[5]))
  return {1}
end

local claim = KEYS[2]
if claim then
  local held = redis.call('HMGET', claim, 'request', 'hash')
  if held[1] and held[1] ~= ARGV[4] then return {2, held[1], held[2]} end
end

local request, ttl, tokens, model = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local earliest = sweep()
local known = redis.call('HEXISTS', key, 'l:' .. request) == 1 -- the first answer was lost on the way
local refusal = {0, '', 0, ''}
local writes, lease = {}, {text(now + ttl), text(tokens)}
local left = {1, math.huge, 0, math.huge, 0} -- with this request
local stands = {math.huge, 0, math.huge, 0} -- without it
local latest = now + ttl

for place, scope in ipairs({model, '*'}) do
  local rpm, tpm, most = tonumber(ARGV[5 + 3 * place]), tonumber(ARGV[6 + 3 * place]), tonumber(ARGV[7 + 3 * place])
  local have = redis.call('HMGET', key, 'r:' .. scope, 't:' .. scope, 'k:' .. scope, 'n:' .. scope)
  local requests = math.max(tonumber(have[1]) or now + debt, now)
  local clock = math.max(tonumber(have[2]) or now + debt, now)
  local credits, held = tonumber(have[3]) or 0, tonumber(have[4]) or 0
  stands[1] = math.min(stands[1], math.floor((MINUTE - (requests - now)) / cost(1, rpm)))
  stands[2] = math.max(stands[2], requests - now)
  stands[3] = math.min(stands[3], math.floor((MINUTE - (clock - now)) * tpm / MINUTE))
  stands[4] = math.max(stands[4], clock - now)
  if not known then
    requests, clock, held = requests + cost(1, rpm), clock + cost(tokens, tpm), held + 1
    local function refuse(limit, wait)
      if wait > refusal[3] then refusal = {0, limit, wait, scope} end
    end
    refuse('RPM', requests - now - MINUTE)
    refuse('TPM', clock - now - MINUTE)
    if held > most then refuse('CONCURRENCY', 1) end
  end
  for _, write in ipairs({'r:' .. scope, text(requests), 't:' .. scope, text(clock), 'k:' .. scope, text(credits),
    'n:' .. scope, text(held)}) do
    writes[#writes + 1] = write
  end
  lease[#lease + 1] = text(tpm)
  lease[#lease + 1] = text(clock)
  lease[#lease + 1] = text(credits)
  left[2] = math.min(left[2], math.floor((MINUTE - (requests - now)) / cost(1, rpm)))
  left[3] = math.max(left[3], requests - now)
  left[4] = math.min(left[4], math.floor((MINUTE - (clock - now)) * tpm / MINUTE))
  left[5] = math.max(left[5], clock - now)
  latest = math.max(latest, requests, clock)
end

if refusal[3] > 0 then
  for place, number in ipairs(stands) do refusal[4 + place] = number end
  return refusal
end
if not known then
  redis.call('HSET', key, 'l:' .. request, table.concat(lease, ' ') .. ' ' .. model, 'x',
    text(math.min(earliest, now + ttl)), unpack(writes))
end
if claim then
  redis.call('HSET', claim, 'request', request, 'hash', ARGV[14])
  redis.call('EXPIRE', claim, ARGV[15])
end
local keep = math.ceil((latest - now + MINUTE) / 1000)
if redis.call('PTTL', key) < keep then redis.call('PEXPIRE', key, keep) end
return left
