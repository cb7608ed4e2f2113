-- Routes completions by the selector's answers; see nginx.conf beside this file.

local balancer = require("ngx.balancer")

local CONNECT_MS, SEND_MS, READ_MS = 200, 1000, 3000
local IDLE_MS, POOL = 60000, 32

local _M = {}
_M.__index = _M

local function host_and_port(text)
    local host, port = text:match("^%[?(.-)%]?:(%d+)$")
    return host, tonumber(port)
end

-- `selector` is "unix:/path" or "host:port"; `workers` are "address:port", as they are registered;
-- `token` is the selector's, "" where it asks for none.
function _M.new(options)
    local self = setmetatable({ selector = options.selector, workers = {}, turn = 0 }, _M)
    local token = options.token or ""
    self.authorization = token == "" and "" or "Authorization: Bearer " .. token .. "\r\n"
    for i, text in ipairs(options.workers) do
        local host, port = host_and_port(text)
        self.workers[i] = { host = host, port = port }
    end
    return self
end

-- One request of the selector over a kept connection. Returns the status, its headers by their names
-- in lower case, and the body; or nil and what went wrong.
function _M:ask(path, reservation, body)
    local socket = ngx.socket.tcp()
    socket:settimeouts(CONNECT_MS, SEND_MS, READ_MS)
    local ok, err
    if self.selector:sub(1, 5) == "unix:" then
        ok, err = socket:connect(self.selector, { pool_size = POOL })
    else
        local host, port = host_and_port(self.selector)
        ok, err = socket:connect(host, port, { pool_size = POOL })
    end
    if not ok then
        return nil, err
    end
    ok, err = socket:send({
        "POST ", path, " HTTP/1.1\r\nHost: lean-selector\r\nContent-Type: application/json\r\n",
        self.authorization, "X-Reservation-Id: ", reservation, "\r\nContent-Length: ", tostring(#body), "\r\n\r\n", body,
    })
    if not ok then
        return nil, err
    end
    local line
    line, err = socket:receive()
    local status = line and tonumber(line:match("^HTTP/1%.1 (%d%d%d)"))
    if not status then
        return nil, err or "no HTTP"
    end
    local headers = {}
    while true do
        line, err = socket:receive()
        if not line then
            return nil, err
        end
        if line == "" then
            break
        end
        local name, value = line:match("^([^:]+):%s*(.-)%s*$")
        headers[name:lower()] = value
    end
    local said = ""
    local length = tonumber(headers["content-length"]) or 0
    if length > 0 then
        said, err = socket:receive(length)
        if not said then
            return nil, err
        end
    end
    if headers["connection"] ~= "close" then
        socket:setkeepalive(IDLE_MS, POOL)
    else
        socket:close()
    end
    return status, headers, said
end

local function read_body()
    ngx.req.read_body()
    local body = ngx.req.get_body_data()
    if body then
        return body
    end
    local path = ngx.req.get_body_file()
    if not path then
        return ""
    end
    local file = io.open(path, "rb")
    body = file:read("*a")
    file:close()
    return body
end

-- In the access phase: asks which worker, and refuses what the selector sheds.
function _M:route()
    if ngx.req.get_method() ~= "POST" then
        return
    end
    local body = read_body()
    -- Named before we ask: if the client hangs up meanwhile, the line of the log still frees it.
    local reservation = ngx.var.request_id
    ngx.var.lean_reservation = reservation
    local status, headers, said = self:ask("/route" .. ngx.var.request_uri, reservation, body)
    if not status then
        ngx.log(ngx.ERR, "the selector could not be asked: ", headers)
        return
    end
    if status == 200 then
        local host, port = host_and_port(headers["x-gateway-destination-endpoint"])
        ngx.ctx.lean_booked = { host = host, port = port }
        ngx.var.lean_worker = headers["x-worker-id"]
        ngx.var.lean_rank = headers["x-data-parallel-rank"]
        -- With a pair of workers: who prefills. Else there are none, and nothing is sent.
        ngx.var.lean_prefiller = headers["x-prefiller-host-port"] or ""
        ngx.var.lean_prefill_rank = headers["x-prefill-data-parallel-rank"] or ""
        ngx.var.lean_prefill_worker = headers["x-prefill-worker-id"] or ""
    elseif status == 429 or status == 400 or status == 413 then
        -- Shed (come back in a second), or a request that no worker would take either.
        ngx.status = status
        ngx.header["content-type"] = "application/json"
        ngx.header["retry-after"] = headers["retry-after"]
        ngx.print(said)
        return ngx.exit(status)
    elseif status == 401 or status == 403 then
        ngx.log(ngx.ERR, "the selector refuses the token of nginx.conf")
    end
    -- Else it is down, or has no worker for this model: what a worker says is the best answer.
end

-- In the balancer phase: the worker that was booked first, then others in turn.
function _M:balance()
    local context = ngx.ctx
    local tries = (context.lean_tries or 0) + 1
    context.lean_tries = tries
    if tries == 1 then
        balancer.set_more_tries(#self.workers - 1)
    end
    local booked = context.lean_booked
    if booked and tries == 1 then
        return balancer.set_current_peer(booked.host, booked.port)
    end
    local worker
    for _ = 1, #self.workers do
        self.turn = self.turn % #self.workers + 1
        worker = self.workers[self.turn]
        if not (booked and worker.host == booked.host and worker.port == booked.port) then
            break
        end
    end
    balancer.set_current_peer(worker.host, worker.port)
end

local function tell(premature, self, reservation)
    if not premature then
        self:ask("/reservations/" .. reservation .. "/prefill_complete", reservation, "")
    end
end

-- In the body filter: the first byte of the answer.
function _M:first_byte()
    local context = ngx.ctx
    if context.lean_booked and not context.lean_told and #ngx.arg[1] > 0 then
        context.lean_told = true
        ngx.timer.at(0, tell, self, ngx.var.lean_reservation)
    end
end

return _M
