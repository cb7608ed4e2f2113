"""What the compiled run of continuous integration leaves out, and why: nothing of it is compiled.

All other tests run on both forms (D38). What is named here is a folder or a file of `tests/`; the
reason stands beside it. Who looks for what is compiled finds it in `setup.py`.
"""

from pathlib import Path

MARK = "one_form"
TESTS = Path(__file__).parents[1]
ONE_FORM = {
    "client": "the client library is not compiled; its calls on a service are also those of"
    " tests/embedded and tests/api",
    "deploy/test_manifests.py": "reads manifests; what they start is started from the image too",
    "deploy/test_recipes.py": "reads files",
    "deploy/test_unit.py": "reads a unit; what it lets through is asked of the system",
    "documents/test_commands.py": "reads pages, and command lines, which are not compiled",
    "documents/test_python_examples.py": "examples of the client library",
    "loadtest": "load generators are not of the package; the compiled form has its own comparison",
    "gateway/test_passing.py": "its placing only remembers; what passes in a process is in"
    " tests/gateway/test_handler.py",
    "gateway/test_proxied_request.py": "its leases are subclasses; those in processes go its way",
    "recipes": "gateways of others, by their own configuration; what a selector answers them is in"
    " tests/gateway/test_route.py, and what it reads of them in tests/gateway/test_access_logs.py",
}
# These use compiled modules, so they run on both forms, wherever they stand.
EXCEPT = {
    "client/test_leaks.py": "a storm of calls and cancellations on the compiled service",
}


def is_of_one_form(test: Path) -> bool:
    """Whether the compiled run leaves this file out."""
    if not test.is_relative_to(TESTS):
        return False
    path = test.relative_to(TESTS)
    names = {str(path), *(str(folder) for folder in path.parents)}
    return bool(names & ONE_FORM.keys()) and str(path) not in EXCEPT
