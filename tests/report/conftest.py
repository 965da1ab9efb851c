import pytest

from report import records


@pytest.fixture(params=list(records.ALL))
def record(request):
    """Each synthetic record in turn."""
    return records.ALL[request.param]()
