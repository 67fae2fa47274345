"""The config of the programs that sample: service_api_caller_v1.py, vllm_inference.py, openai_api_caller_v1.py."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from espalier.runtime.schemas.shared_topics import EngineConfig, TrackingConfig


@dataclass
class SampleConfig:
    """`service_api_caller_v1.py`, `vllm_inference.py`, `openai_api_caller_v1.py`: requests to a sampler."""

    output: str = MISSING
    """the file to write, a row as each answer comes; the same command goes on where it was stopped"""
    policy: str = MISSING
    """the model folder whose tokenizer writes the prompts; empty where none is needed"""
    policies: Any = None
    """vllm_inference.py: model folders to evaluate one after the other: a list, a pattern, or a mapping of names to
    folders"""
    seed: int = 0
    """of every random draw, of the requests' seeds too"""
    task: Any = MISSING
    """the task of the problems: how a prompt is written and an answer is graded"""
    requests: Any = MISSING
    """what is asked (problems, states or judgements) and what is made of the answers"""
    params: Any = MISSING
    """sampling parameters of every request: samples (`n`), temperature, `max_tokens`, stop strings"""
    client: Any = MISSING
    """who is asked: a vLLM server, engines without one, a chat API"""
    server: Any = None
    """the vLLM server to start first, and only if something is left to ask; null: `client` names a running one, or has
    its engines itself"""
    search: Any = None
    """how solutions are searched for, with which scorer and budget (docs/search.md); empty: they are sampled"""
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_failed_share: float = 0.0
    """share of the requests that may be refused (too long, say): up to it the run is finished without them (exit code
    0, they are counted and listed in X.failed.jsonl), beyond it the exit code is 1"""
    pilot: int = 0
    """ask that many problems alone, spread over all of them, say what their answers show, and end; they are kept: the
    same command without it asks the others. 0: all are asked"""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
