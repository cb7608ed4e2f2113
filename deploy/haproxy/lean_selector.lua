-- Routes completions by the selector's answers; see haproxy.cfg beside this file.

local SELECTOR = os.getenv("LEAN_SELECTOR")
local TOKEN = os.getenv("LEAN_SELECTOR_TOKEN") -- none: nothing is sent
local BACKEND = "workers"
local TIMEOUT_MS = 3000
local OF_PREFILL = {
    prefiller = "x-prefiller-host-port",
    prefill_rank = "x-prefill-data-parallel-rank",
    prefill_worker = "x-prefill-worker-id",
}

-- The servers of the backend, by the address and port that the selector names.
local names
local function server_at(address)
    if not names then
        names = {}
        for name, server in pairs(core.backends[BACKEND].servers) do
            names[server:get_addr()] = name
        end
    end
    return names[address]
end

local function first(headers, name)
    return headers and headers[name] and headers[name][0]
end

local function route(txn)
    local body = txn.sf:req_body()
    if #body < (tonumber(txn.sf:req_body_size()) or 0) then
        return -- more than a buffer holds
    end
    -- Named before we ask: if the client hangs up meanwhile, the line of the log still frees it.
    local reservation = txn.sf:unique_id()
    txn:set_var("txn.lean_reservation", reservation)
    local headers = {
        ["content-type"] = { "application/json" },
        ["x-reservation-id"] = { reservation },
    }
    if TOKEN then
        headers["authorization"] = { "Bearer " .. TOKEN }
    end
    local answer = core.httpclient():post{
        url = "http://lean-selector/route" .. txn.sf:pathq(),
        dst = SELECTOR,
        timeout = TIMEOUT_MS,
        headers = headers,
        body = body,
    }
    if answer.status == 200 then
        local name = server_at(first(answer.headers, "x-gateway-destination-endpoint"))
        if not name then
            txn:Warning("the selector chose a server that the backend has not")
            return
        end
        txn:set_var("txn.lean_server", name)
        txn:set_var("txn.lean_worker", first(answer.headers, "x-worker-id"))
        txn:set_var("txn.lean_rank", first(answer.headers, "x-data-parallel-rank"))
        -- With a pair of workers: who prefills.
        for name, header in pairs(OF_PREFILL) do
            local value = first(answer.headers, header)
            if value then
                txn:set_var("txn.lean_" .. name, value)
            end
        end
    elseif answer.status == 429 or answer.status == 400 or answer.status == 413 then
        -- Shed (come back in a second), or a request that no worker would take either.
        local said = { ["content-type"] = { "application/json" } }
        local retry_after = first(answer.headers, "retry-after")
        if retry_after then
            said["retry-after"] = { retry_after }
        end
        txn:done(txn:reply{ status = answer.status, headers = said, body = answer.body })
    elseif answer.status == 401 or answer.status == 403 then
        core.Warning("the selector refuses LEAN_SELECTOR_TOKEN")
    end
    -- Else it is down, or has no worker for this model: what a worker says is the best answer.
end

core.register_action("lean_route", { "http-req" }, route, 0)
