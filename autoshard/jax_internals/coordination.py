"""jax's coordination service: keys and values that all processes of a program see."""

from __future__ import annotations

from typing import Any

import jax


class Coordination:
    """The keys and values of jax's coordination service, which all processes of a program see."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, once."""
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key, waited for; None where it is not there after `limit_s` seconds."""
        try:
            value: bytes = self._client.blocking_key_value_get_bytes(key, int(1000 * limit_s))
        except jax.errors.JaxRuntimeError as error:
            # The client raises one class for all errors of the service.
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return value

    def below(self, prefix: str) -> dict[str, bytes]:
        """Values by key of all keys with a prefix."""
        return dict(self._client.key_value_dir_get_bytes(prefix))

    def count(self, key: str) -> int:
        """Adds one to a number, and says what it is now."""
        return int(self._client.key_value_increment(key, 1))

    def delete(self, prefix: str) -> None:
        """Forgets all keys with a prefix that ends in a slash."""
        self._client.key_value_delete(prefix)


def coordination() -> Coordination | None:
    """What `jax.distributed.initialize` connected this process to; None where it was not called."""
    from jax._src import distributed

    client = distributed.global_state.client
    return None if client is None else Coordination(client)
