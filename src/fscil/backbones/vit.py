"""A frozen Vision Transformer, run block by block from outside so that adapters and prompts can be slotted in.

It is timm's, or the same without timm where it is plain enough (`plain_vit.py`). Its modules are called in the order
that timm's own forward does, with `attn.qkv` wrapped (see `lora.KVLinear`). Exact savings that the plain forward cannot
take:

* all adapter streams read the same tokens in block 0, so the embedding, the first norm and the frozen qkv are computed
  once, and no gradient flows below them;
* where the feature is the class token, the last block's query, projection and MLP run on that one token.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fscil.backbones.attention import attention
from fscil.backbones.lora import KVLinear, LoRA
from fscil.backbones.plain_vit import PlainViT
from fscil.data.transforms import Colour
from fscil.errors import UserError

if TYPE_CHECKING:
    from fscil.runtime import Runtime

Prefix = Callable[[int], tuple[Tensor, Tensor] | None]  # block -> (keys, values), each (B, heads, length, head_dim)


class Backbone(nn.Module):
    """A frozen ViT whose features are timm's pooled pre-logits output (the class token after the final norm for the
    paper's ViTs).

    >>> import timm
    >>> sizes = dict(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2)
    >>> vit = timm.models.vision_transformer.VisionTransformer(**sizes)
    >>> tuple(Backbone(vit, "tiny")(torch.zeros(3, 3, 16, 16)).shape)
    (3, 16)
    """

    vit: Any  # timm's VisionTransformer, whose modules are known by what they do

    def __init__(
        self,
        vit: nn.Module,
        name: str,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ):
        super().__init__()
        _check_plain(vit, name)
        self.vit, self.name = vit.eval().requires_grad_(False), name
        self.mean, self.std = cast("Colour", tuple(mean)), cast("Colour", tuple(std))
        for block in self.vit.blocks:
            block.attn.qkv = KVLinear(block.attn.qkv)
        self.checkpointing = False
        self._run_block: Callable[..., tuple[Tensor, Tensor]] = run_block
        self._hash: str | None = None
        self._master: dict[str, Tensor] | None = None  # the weights before rounding, on the CPU

    @property
    def dim(self) -> int:
        return self.vit.num_features

    @property
    def depth(self) -> int:
        return len(self.vit.blocks)

    @property
    def heads(self) -> int:
        return self.vit.blocks[0].attn.num_heads

    @property
    def head_dim(self) -> int:
        attn = self.vit.blocks[0].attn
        return attn.qkv.out_features // (3 * attn.num_heads)

    @property
    def image_size(self) -> int:
        return self.vit.patch_embed.img_size[0]

    @property
    def prefix_tokens(self) -> int:
        return self.vit.num_prefix_tokens

    @property
    def token_pooled(self) -> bool:
        return (
            self.vit.global_pool == "token"
            and getattr(self.vit, "attn_pool", None) is None
            and self.vit.num_prefix_tokens > 0
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.vit.blocks[0].attn.qkv.weight.dtype

    @property
    def hash(self) -> str:
        """Short SHA-256 of the weights in float32."""
        if self._hash is None:
            digest = hashlib.sha256()
            for key, value in sorted(self.vit.state_dict().items()):
                if not key.startswith("head."):
                    digest.update(key.encode())
                    digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
            self._hash = digest.hexdigest()[:16]
        return self._hash

    def prepare(self, runtime: Runtime) -> Backbone:
        """Moves the weights to the runtime's device and precision and compiles the block if asked for."""
        _ = self.hash  # taken before any rounding
        if runtime.dtype == torch.bfloat16 and self.dtype != torch.bfloat16:
            self._master = {k: v.clone() for k, v in self.vit.state_dict().items()}
        self.to(device=runtime.device, dtype=runtime.dtype)
        self.checkpointing = runtime.checkpointing
        if runtime.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            self._run_block = torch.compile(run_block, dynamic=False)
        return self

    def in_float32(self) -> Backbone:
        """This backbone with unrounded weights (a copy where the compute precision is lower)."""
        if self._master is None:
            return self
        twin = copy.copy(self)
        twin._modules = {"vit": copy.deepcopy(self.vit).float()}
        twin.vit.load_state_dict(self._master)
        twin._run_block, twin._master = run_block, None
        return twin

    def trainable_copy(self) -> Backbone:
        """A copy in full precision whose every weight can be trained, for methods that fine-tune the backbone."""
        exact = self.in_float32()
        twin = copy.copy(exact)
        twin._modules = {"vit": copy.deepcopy(exact.vit).requires_grad_(True)}
        twin._hash = None
        return twin

    def forward(self, images: Tensor, lora: LoRA | None = None, prefix: Prefix | None = None) -> Tensor:
        """Features (B, d), or (S, B, d) through the S adapter sets of `lora`."""
        tokens = self.blocks(self.embed(images), lora=lora, prefix=prefix, pooled=True)
        features = self.pool(tokens)
        return features if lora is None else features.view(lora.sets, -1, features.shape[-1])

    def embed(self, images: Tensor) -> Tensor:
        """Tokens (B, T, d) that enter block 0."""
        vit = self.vit
        tokens = vit._pos_embed(self._patches(images.to(self.dtype)))
        return vit.norm_pre(vit.patch_drop(tokens))

    def _patches(self, images: Tensor) -> Tensor:
        """The patch embedding; a convolution whose stride is its kernel is one matrix product, which GPUs run
        faster."""
        embed = self.vit.patch_embed
        proj = getattr(embed, "proj", None)
        if not (images.is_cuda and isinstance(proj, nn.Conv2d) and proj.stride == proj.kernel_size and embed.flatten):
            return embed(images)
        (height, width), batch = proj.kernel_size, len(images)
        grid = images.view(batch, 3, images.shape[2] // height, height, images.shape[3] // width, width)
        patches = grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 3 * height * width)
        return embed.norm(F.linear(patches, proj.weight.flatten(1), proj.bias))

    @overload
    def blocks(
        self,
        tokens: Tensor,
        start: int = 0,
        stop: int | None = None,
        lora: LoRA | None = None,
        prefix: Prefix | None = None,
        pooled: bool = False,
        probes: None = None,
    ) -> Tensor: ...

    @overload
    def blocks(
        self,
        tokens: Tensor,
        start: int = 0,
        stop: int | None = None,
        lora: LoRA | None = None,
        prefix: Prefix | None = None,
        pooled: bool = False,
        *,
        probes: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor]]: ...

    def blocks(
        self,
        tokens: Tensor,
        start: int = 0,
        stop: int | None = None,
        lora: LoRA | None = None,
        prefix: Prefix | None = None,
        pooled: bool = False,
        probes: Sequence[Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Runs blocks [start, stop). With `lora`, tokens enter block 0 as (B, T, d) and leave as (S·B, T, d), streams
        outermost.

        `pooled` keeps only what `pool` needs of the last block. `probes` (one tensor (S·B, T, 2d) per block) are added
        to the keys and values, and the inputs of the qkv projections are returned too: the two sides of the gradient of
        a dense ΔW.
        """
        stop = self.depth if stop is None else stop
        inputs: list[Tensor] = []
        for index in range(start, stop):
            block = self.vit.blocks[index]
            run = partial(
                self._run_block,
                block,
                factors=lora.layer(index) if lora is not None else None,
                shared=index == 0 and lora is not None,
                prefix=prefix(index) if prefix is not None else None,
                class_only=pooled and self.token_pooled and index == self.depth - 1,
                probe=probes[index] if probes is not None else None,
            )
            if self.checkpointing and torch.is_grad_enabled():
                tokens, attended = checkpoint(run, tokens, use_reentrant=False)
            else:
                tokens, attended = run(tokens)
            if probes is not None:
                inputs.append(attended)
        return (tokens, inputs) if probes is not None else tokens

    def pool(self, tokens: Tensor) -> Tensor:
        """The feature: final norm and timm's pooling, in at least float32."""
        features = self.vit.forward_head(self.vit.norm(tokens), pre_logits=True)
        return features if features.dtype == torch.float64 else features.float()


def run_block(
    block: Any,
    tokens: Tensor,
    factors: tuple[Tensor, Tensor] | None = None,
    shared: bool = False,
    prefix: tuple[Tensor, Tensor] | None = None,
    class_only: bool = False,
    probe: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One pre-norm transformer block; returns its tokens and the normed tokens its attention read."""
    attended = block.norm1(tokens)
    if shared and factors is not None and factors[0].shape[0] > 1:
        tokens = tokens.expand(factors[0].shape[0], *tokens.shape).flatten(0, 1)
    update = attend(block.attn, attended, factors, shared, prefix, class_only, probe)
    if class_only:
        tokens = tokens[:, :1]
    tokens = tokens + block.drop_path1(block.ls1(update))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens)))), attended


def attend(
    attn: Any,
    x: Tensor,
    factors: tuple[Tensor, Tensor] | None = None,
    shared: bool = False,
    prefix: tuple[Tensor, Tensor] | None = None,
    class_only: bool = False,
    probe: Tensor | None = None,
) -> Tensor:
    """timm's attention with adapters on k and v, learned key/value prefixes (prefix tuning), and optionally one query
    only."""
    q, k, v = attn.qkv.split(x, factors, shared)
    batch, width = q.shape[0], q.shape[2]
    if probe is not None:
        k, v = k + probe[..., :width], v + probe[..., width:]
    if class_only:
        q = q[:, :1]
    q, k, v = (part.reshape(batch, -1, attn.num_heads, width // attn.num_heads).transpose(1, 2) for part in (q, k, v))
    q, k = attn.q_norm(q), attn.k_norm(k)
    if prefix is not None:
        k, v = torch.cat([prefix[0].to(k.dtype), k], 2), torch.cat([prefix[1].to(v.dtype), v], 2)
    out = attention(q, k, v, attn.scale)
    out = getattr(attn, "norm", nn.Identity())(out.transpose(1, 2).reshape(batch, -1, width))
    return attn.proj_drop(attn.proj(out))


def _check_plain(vit: Any, name: str) -> None:
    """Refuses models whose blocks are not the plain pre-norm kind this module knows how to run."""
    if isinstance(vit, PlainViT):
        return
    from timm.layers import Attention as LayersAttention
    from timm.models.vision_transformer import Attention, Block, VisionTransformer

    plain = isinstance(vit, VisionTransformer) and all(
        type(b) is Block and isinstance(b.attn, (Attention, LayersAttention)) and getattr(b.attn, "gate", None) is None
        for b in vit.blocks
    )
    if not plain:
        raise UserError(
            f'backbone "{name}" is a {type(vit).__name__} that is not a plain ViT (class VisionTransformer with '
            "standard blocks); choose a ViT, DeiT, DINO, DINOv2, CLIP or SigLIP image tower."
        )
