// Routes a completion by the selector's answer; see nginx.conf beside this file.

const ASK = '/_lean/route';

async function route(r) {
    if (r.method !== 'POST') {
        r.internalRedirect('@balanced');
        return;
    }
    // Named before we ask: if the client hangs up meanwhile, the line of the log still frees it.
    r.variables.lean_reservation = r.variables.request_id;
    let answer;
    try {
        answer = await r.subrequest(ASK, { method: 'POST' });
    } catch (e) {
        r.error('the selector could not be asked: ' + e.message);
        r.internalRedirect('@balanced');
        return;
    }
    if (answer.status === 200 && answer.headersOut['x-gateway-destination-endpoint']) {
        r.variables.lean_destination = answer.headersOut['x-gateway-destination-endpoint'];
        r.variables.lean_worker = answer.headersOut['x-worker-id'];
        r.variables.lean_rank = answer.headersOut['x-data-parallel-rank'];
        // With a pair of workers: who prefills. Else there are none, and nothing is sent.
        r.variables.lean_prefiller = answer.headersOut['x-prefiller-host-port'] || '';
        r.variables.lean_prefill_rank = answer.headersOut['x-prefill-data-parallel-rank'] || '';
        r.variables.lean_prefill_worker = answer.headersOut['x-prefill-worker-id'] || '';
        r.internalRedirect('@booked');
        return;
    }
    if (answer.status === 429 || answer.status === 400 || answer.status === 413) {
        // Shed (come back in a second), or a request that no worker would take either.
        if (answer.headersOut['retry-after']) {
            r.headersOut['retry-after'] = answer.headersOut['retry-after'];
        }
        r.headersOut['content-type'] = 'application/json';
        r.return(answer.status, answer.responseText);
        return;
    }
    if (answer.status === 401 || answer.status === 403) {
        r.error('the selector refuses the token of nginx.conf');
    }
    // Down, slow, or without a worker for this model: what a worker says of it is the best answer.
    r.internalRedirect('@balanced');
}

export default { route };
