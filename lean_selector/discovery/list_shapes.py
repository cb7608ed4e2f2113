"""The forms of a file that lists workers."""

import msgspec

from lean_selector.discovery.particulars import Particulars, Place


class Registrations(msgspec.Struct, forbid_unknown_fields=True):
    """Bodies of POST /workers, without a `worker_id` if the workers need no names of their own."""

    workers: list[Particulars] | None


class ListedEndpoint(msgspec.Struct):
    """One of llm-d's file discovery. What else stands there is for its own router."""

    address: str
    port: int | str
    labels: dict[str, str] = {}

    def entry(self) -> Particulars:
        """The label `model` is the model's name. Raises ValueError for what is no port."""
        if not str(self.port).isdigit() or not 1 <= int(self.port) <= 0xFFFF:
            raise ValueError(f"`{self.port}` of {self.address} is no port")
        place = Place(self.address, int(self.port))
        return Particulars(endpoint=place.url, model_name=self.labels.get("model"))


class Endpoints(msgspec.Struct):
    """llm-d's file discovery."""

    endpoints: list[ListedEndpoint] | None
