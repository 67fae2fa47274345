"""One async client protocol for every caller: a running vLLM server, an engine in process, a chat API."""
