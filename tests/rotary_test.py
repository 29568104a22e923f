"""Rotary embedding: complex rotation, relative positions, absolute tables."""

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import numpy as np

from longstraw_jax import RopeConfig
from longstraw_jax.ops.rotary import rotary_tables, rotate_half

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

  def test_no_rotary_dims_leave_the_head_alone(self):
    x = jnp.ones((T, N, H))
    tables = rotary_tables(jnp.arange(T), RopeConfig(dim=0), "float64")
    np.testing.assert_array_equal(rotate_half(x, *tables), x)


if __name__ == "__main__":
  absltest.main()
