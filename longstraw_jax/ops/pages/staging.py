"""Layers over pages in host memory: their own rows alone are on the device.

`over_staged` gives a layer that reads host pages its own rows on the device;
what its reads add to the tap goes back the same way:

  borrow     own = any [1, ..., S, H] on the device     | host[layer] = own
  ...        reads hand own on                          | reads add into own
  give_back  the whole tap, unchanged                   | own = host[layer]

Left what the forward pass does, right the backward pass, read from below: it
has the accumulator of one layer on the device and all others in host memory.
"""

from collections.abc import Callable

import jax
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

from longstraw_jax.ops.pages.memory import (
  HOST,
  on_host,
  put_layer,
  take_layer,
)
from longstraw_jax.ops.pages.segment import Segment


@custom_vmap
def _one_for_all(own):
  return own


@_one_for_all.def_vmap
def _refuse_one_each(*_):
  raise ValueError(
    "jax.vmap asks for a gradient a call of pages in host memory, where JAX "
    "keeps no batch: take jax.lax.map, or pages='device'"
  )


@jax.custom_vjp
def _borrow(layer, tap):
  del layer
  # Never read, so any values do.
  own = lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype)
  return jax.tree.map(own, tap), tap


def _borrow_fwd(layer, tap):
  return _borrow(layer, tap), layer


def _borrow_bwd(layer, cotangents):
  own, tap = cotangents
  return None, put_layer(tap, layer, _one_for_all(own))


_borrow.defvjp(_borrow_fwd, _borrow_bwd)


@jax.custom_vjp
def _give_back(layer, own, tap):
  del layer, own
  return tap


def _give_back_fwd(layer, own, tap):
  del own
  return tap, layer


def _give_back_bwd(layer, tap):
  return None, take_layer(tap, layer), tap


_give_back.defvjp(_give_back_fwd, _give_back_bwd)


def over_staged(apply: Callable) -> Callable:
  """A layer (variables, x, span, state) that may read pages in host memory.

  To be rematerialised together with the layer: what it stages is then fetched
  again by the backward pass instead of kept.
  """

  def call(variables, x_TD, span, state):
    pages, taps = [], []
    for segment in state.pages:
      tap = None
      if on_host(segment.rows):
        segment, tap = _staged(segment)
      pages.append(segment)
      taps.append(tap)
    own_state = state.replace(pages=tuple(pages))
    x_TD, update = apply(variables, x_TD, span, own_state)
    back = tuple(
      own if tap is None else _give_back(segment.layer, own, tap)
      for segment, own, tap in zip(state.pages, update.taps, taps, strict=True)
    )
    return x_TD, update.replace(taps=back)

  return call


def _staged(segment: Segment) -> tuple[Segment, dict | None]:
  """One layer's segment on the device, and the whole tap to give back."""
  own, tap = None, segment.tap
  if tap is not None:
    own, tap = _borrow(segment.layer, tap)
  rows = take_layer(segment.rows, segment.layer)
  return segment.replace(rows=rows, tap=own, layer=jnp.int32(0)), tap


def keeps_all_but_staged(prim, *inputs, **params) -> bool:
  """A jax.checkpoint policy: saves everything, except what was staged."""
  del params
  fetched = prim.name == "device_put"
  return not fetched and not any(x.memory_space == HOST for x in inputs)
