-- wrk ends by the clock, not by a count. This script hands every request of its lane out once, in
-- order, and lets a connection sleep when there is none left for it: when all of its thread sleep,
-- the lane is answered, and with the last lane the script ends wrk. Threads share no Lua state, so
-- they count each other in a file. The first call of all is wrk's own look at a request.
-- LANES and CONNECTIONS are replaced by numbers before wrk reads this.
local ffi = require("ffi")
ffi.cdef[[int getpid(void); int kill(int, int);]]
local folder, requests, looked, at, given, asleep = "", {}, true, 0, 0, 0
local lanes = 0
setup = function(thread) thread:set("lane", lanes) lanes = lanes + 1 end
init = function(args)
  folder, looked = args[1], lane ~= 0
  local file = assert(io.open(folder .. "/requests." .. lane, "rb"))
  for length in io.lines(folder .. "/lengths." .. lane) do
    requests[#requests + 1] = file:read(tonumber(length))
  end
end
local function ended()
  local file = assert(io.open(folder .. "/ended", "a"))
  file:write("x")
  file:close()
  file = assert(io.open(folder .. "/ended", "r"))
  if file:seek("end") >= LANES then ffi.C.kill(ffi.C.getpid(), 2) end
  wrk.thread:stop()
end
delay = function()
  if given < #requests then given = given + 1 return 0 end
  asleep = asleep + 1
  if asleep == CONNECTIONS then ended() end
  return 3600000
end
request = function()
  if not looked then looked = true return requests[1] end
  at = at + 1
  return requests[at]
end
done = function(summary, latency)
  local e = summary.errors
  local form = '\nRESULT {"requests":%d,"seconds":%f,"p50_us":%d,"p99_us":%d,"bad":%d}\n'
  io.write(string.format(form, summary.requests, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(99),
    e.status + e.connect + e.read + e.write + e.timeout))
end
