"""What a worker process of vLLM-Omni's server does, in a process of its own: plugins, groups, model runner, requests.

    python served.py FL2VA-FOLDER

Each step is the engine's own function (``WorkerProc.worker_main``, ``DiffusionWorker.init_device`` and ``load_model``);
those two classes are left out because their module imports every model vLLM has, torchvision included. Prints the
digest of what each request returned, one line a request.
"""

import hashlib
import json
import os
import sys

import torch


def config(folder):
    """The diffusion stage of a deployment in two stages: text rows come with the request."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    stated = OmniDiffusionConfig(
        model=folder,
        num_gpus=1,
        model_loaded={"text_encoder": False, "vae_encoder": False},
        trust_remote_code=True,
        enforce_eager=True,
    )
    stated.enrich_config()
    return stated


def request(padding):
    """Text to video and audio in three sampler points, its packed rows padded to a multiple of the engine's choice."""
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams
    from vllm_omni.model_executor.models.minimax_h3.conditioning import MiniMaxH3EncoderConditioning

    text = torch.randn(6, 5120, generator=torch.Generator().manual_seed(3)).bfloat16()
    encoded = MiniMaxH3EncoderConditioning(
        task="t2va",
        height=32,
        width=32,
        num_frames=107,
        latent_t=32,
        audio_t=178,
        hidden_states=text,
        token_tags=torch.ones(6, dtype=torch.int64),
    )
    sampling = OmniDiffusionSamplingParams(
        seed=1,
        num_inference_steps=3,
        height=32,
        width=32,
        num_frames=107,
        extra_args={} if padding is None else {"pad_seq_len": padding},
    )
    prompt = {"prompt": "a", "additional_information": {"encoder_output": encoded.to_omni_payload()}}
    return OmniDiffusionRequest(prompt=prompt, sampling_params=sampling, request_id=f"padding-{padding}")


def digest(output):
    assert output.error is None, output.error
    content = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in output.output)
    return hashlib.sha256(content).hexdigest()


def main(folder):
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()

    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager
    from vllm_omni.diffusion.distributed.parallel_state import (
        destroy_distributed_env,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
    from vllm_omni.platforms import current_omni_platform

    os.environ.update(MASTER_ADDR="localhost", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    stated, device = config(folder), current_omni_platform.get_torch_device(0)
    os.environ["MASTER_PORT"] = str(stated.master_port)
    vllm_config = create_diffusion_vllm_config(device, stated)
    with (
        set_forward_context(vllm_config=vllm_config, omni_diffusion_config=stated),
        set_current_vllm_config(vllm_config),
    ):
        init_distributed_environment(world_size=1, rank=0)
        initialize_model_parallel()
        init_workspace_manager(device)
        runner = DiffusionModelRunner(vllm_config, stated, device)
        runner.load_model()
        for padding in (None, 640):
            line = {"padding": padding, "digest": digest(runner.execute_model(request(padding)))}
            sys.stdout.write(json.dumps(line) + "\n")
    destroy_distributed_env()


if __name__ == "__main__":
    main(sys.argv[1])
