"""What the directory in Redis runs, each operation one Lua script.

Owns: the scripts, and the word for a claim that was refused.
Knows nothing of: connections, who calls. `directory` says what the records mean.
"""

STALE = "STALE ownership changed, expired or directory restarted"
# KEYS[1]: meta. ARGV[1]: a fresh UUID. An epoch without its counter is not to be trusted.
_EPOCH = """
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'gen')
local epoch = meta[1]
if not epoch or not meta[2] then
  epoch = ARGV[1]
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'gen', '0')
end
"""
# KEYS[2]: a record.
_RECORD = (
    _EPOCH
    + """
local r = redis.call('HMGET', KEYS[2], 'epoch', 'seq', 'owner', 'state')
if r[1] and r[1] ~= epoch then
  redis.call('DEL', KEYS[2])
  r = {false, false, false, false}
end
local seq = r[2] or '0'
local state = r[4] or seq
"""
)
SCRIPTS = {
    # Many records in one call; one line a record, as a client takes long over many small replies.
    "lookup": _EPOCH
    + """
local out = {epoch}
for i = 2, #KEYS do
  -- One that is something else must not keep the others from being found.
  local r = redis.pcall('HMGET', KEYS[i], 'epoch', 'seq', 'owner', 'fp')
  if r[1] and r[1] ~= epoch then
    redis.call('DEL', KEYS[i])
    r = {false}
  end
  if r[1] then redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
  out[i] = r[1] and ((r[2] or '0') .. ' ' .. (r[3] or '') .. ' ' .. (r[4] or '')) or '0  '
  out[i] = string.gsub(out[i], '\\n', '?')
end
return table.concat(out, '\\n')
""",
    "claim": _RECORD
    + f"""
if epoch ~= ARGV[3] or (seq ~= ARGV[4] and state ~= ARGV[4]) then
  return redis.error_reply('{STALE}')
end
local new = redis.call('HINCRBY', KEYS[1], 'gen', 1)
redis.call('HSET', KEYS[2], 'epoch', epoch, 'seq', new, 'owner', ARGV[5], 'fp', ARGV[6])
if ARGV[9] == '1' then redis.call('HSET', KEYS[2], 'state', state)
else redis.call('HDEL', KEYS[2], 'state') end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[7], ARGV[8] .. ' ' .. epoch .. ' ' .. new .. ' ' .. ARGV[5])
return new
""",
    "check": _RECORD
    + """
if epoch == ARGV[3] and r[2] and r[2] == ARGV[4] and r[3] == ARGV[5] then
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return 1
end
return 0
""",
    "release": _RECORD
    + """
if epoch == ARGV[3] and r[2] and r[2] == ARGV[4] and r[3] == ARGV[5] then
  redis.call('DEL', KEYS[2])
  return 1
end
return 0
""",
    # The clock is the directory's own: those of the servers may differ.
    "announce": """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], ARGV[3])
else redis.call('HSET', KEYS[1], ARGV[3], (now + ARGV[5]) .. ' ' .. ARGV[4]) end
local all, out = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local till, room = string.match(all[i + 1], '^(%d+) (%d+)$')
  if not till or tonumber(till) <= now then redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] ~= ARGV[3] then out[#out + 1] = all[i] .. ' ' .. room end
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return table.concat(out, '\\n')
""",
}
