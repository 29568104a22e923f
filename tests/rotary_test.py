"""Rotary embedding: complex rotation, relative positions, absolute tables."""

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from longstraw_jax import RopeConfig
from longstraw_jax.ops.rotary import (
  rotary_frequencies,
  rotary_tables,
  rotate_half,
)

TOLERANCE = {"float64": 1e-6}  # angles are float32 in every dtype

T, N, H, ROTARY, THETA = 7, 2, 8, 6, 1e4
ROPE = RopeConfig(dim=ROTARY, theta=THETA)


class RotaryTest(parameterized.TestCase):
  def test_equals_complex_rotation(self):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, N, H))
    positions = np.arange(5, 5 + T)
    tables = rotary_tables(positions, ROPE, "float64")
    half = ROTARY // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) * 2 / ROTARY)
    z = (x[..., :half] + 1j * x[..., half:ROTARY]) * np.exp(1j * angles)[
      :, None
    ]
    wanted = np.concatenate([z.real, z.imag, x[..., ROTARY:]], axis=-1)
    got = rotate_half(jnp.asarray(x), *tables)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE["float64"])

  def test_products_depend_on_distance_only(self):
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, N, H))

    def product(at, distance):
      tables = [
        rotary_tables(jnp.array([p]), ROPE, "float64")
        for p in (at + distance, at)
      ]
      turned = [
        rotate_half(jnp.asarray(x), *t)
        for x, t in zip((q, k), tables, strict=True)
      ]
      return (turned[0] * turned[1]).sum(-1)

    near, far = product(3, 4), product(40, 4)
    np.testing.assert_allclose(near, far, atol=10 * TOLERANCE["float64"])
    self.assertGreater(np.abs(near - product(3, 5)).max(), 1e-2)

  def test_any_split_of_positions_gives_the_same_bits(self):
    positions = jnp.arange(2**20 - 3, 2**20 + 4, dtype=jnp.int32)
    whole = rotary_tables(positions, ROPE, "float64")
    for split in (1, 3):
      parts = [
        rotary_tables(p, ROPE, "float64")
        for p in (positions[:split], positions[split:])
      ]
      for a, *b in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(a, np.concatenate(b))

  @parameterized.parameters("float64", "float32", "bfloat16")
  def test_dtype_and_angles(self, dtype):
    """Angles are float32 products whatever the dtype of the tables."""
    position, frequency = 2**20 + 1, np.float32(THETA) ** np.float32(-2 / 6)
    cos, sin = rotary_tables(jnp.array([position]), ROPE, dtype)
    self.assertEqual(cos.dtype, jnp.dtype(dtype))
    self.assertEqual(sin.shape, (1, ROTARY // 2))
    angle = np.float32(position) * frequency
    wanted = jnp.cos(jnp.float32(angle)).astype(dtype)
    # The frequency may differ by a float32 ulp, the angle then by 2e-2.
    self.assertLess(abs(float(cos[0, 1]) - float(wanted)), 3e-2)

  def test_beyond_the_integers_of_float32_the_product_is_split(self):
    rope = RopeConfig(dim=64, theta=1e7)
    positions = np.array([2**24 + 1, 31_457_280, 2**31 - 1], np.int32)
    frequencies = rotary_frequencies(rope).astype(np.float64)
    angles = np.fmod(positions[:, None] * frequencies, 2 * np.pi)
    # (a + b) 2^-33 turns of rounded frequencies, then float32.
    off = 2 * np.pi * (positions // 2**12 + 2**12) / 2**33 + 1e-6
    cos, sin = rotary_tables(jnp.asarray(positions), rope, "float64")
    self.assertTrue((np.abs(cos - np.cos(angles)) <= off[:, None]).all())
    self.assertTrue((np.abs(sin - np.sin(angles)) <= off[:, None]).all())

  def test_up_to_there_they_are_the_reference_s(self):
    """The border itself, where both forms stand side by side."""
    positions = np.array([2**24 - 1, 2**24], np.int32)
    angles = positions.astype(np.float32)[:, None] * rotary_frequencies(ROPE)
    cos, sin = rotary_tables(jnp.asarray(positions), ROPE, "float32")
    np.testing.assert_array_equal(cos, jnp.cos(angles))
    np.testing.assert_array_equal(sin, jnp.sin(angles))

  def test_no_rotary_dims_leave_the_head_alone(self):
    x = jnp.ones((T, N, H))
    tables = rotary_tables(jnp.arange(T), RopeConfig(dim=0), "float64")
    np.testing.assert_array_equal(rotate_half(x, *tables), x)


if __name__ == "__main__":
  absltest.main()
