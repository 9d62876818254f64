"""Another client that many use, with HTTP and SSE code of its own: huggingface_hub's."""

from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from support.cluster import MODEL, Cluster

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is in a KV cache?"}]


@pytest.fixture
def client(cluster: Cluster) -> InferenceClient:
    return InferenceClient(base_url=cluster.api, api_key=cluster.key)


def test_a_chat_whole_and_streamed(client: InferenceClient) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0)
    streamed = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)

    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens == 8


def test_an_error_reaches_the_caller(client: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError, match="gpt-4") as raised:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)

    assert raised.value.response.status_code == 404
