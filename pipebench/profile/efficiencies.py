"""Every constant of the analytic profile but the devices' own, each with where it comes from.

None is fitted on the profiles that the analytic one is judged on; `reports/analytic_profile.md` has the judgement.
"""

from dataclasses import dataclass

# Winograd's F(4x4, 3x3), which cuDNN runs for 3x3 convolutions of stride 1 as three passes: a tile of 4x4 outputs takes
# 6x6 products per channel pair instead of 16 * 9. Published: Lavin and Gray, "Fast algorithms for convolutional neural
# networks" (2016).
WINOGRAD_TILE, WINOGRAD_PATCH, WINOGRAD_KERNEL = 4, 6, 3
# A matrix product is cut into tiles, a multiprocessor computes one at a time, and the last of the tiles may leave most
# of the device idle. Published: NVIDIA, "Matrix multiplication background user's guide", tile and wave quantization;
# the sizes are those of it that 32-bit kernels have (`sgemm_128x128`, `128x64`, `64x64`). Assumed: all of one rate, and
# the inner dimension may be split so many ways to fill the device.
TILES = ((128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8, 16)
# Seconds that the host needs to issue one kernel, where a cluster doesn't say. Assumed: eager PyTorch issues about
# 100,000 operations per second; 7 us for the simplest that autograd records, before any kernel, were measured by its
# users in 2020 (pytorch/pytorch, issue 41383).
LAUNCH_S = 1e-5


@dataclass(frozen=True)
class Efficiencies:
    """What fraction of a device's peak each kind of operation reaches, and what a launch inside a library costs."""

    # Of the peak rate, a matrix product that fills the device. Published: 83 Tflop/s with tensor cores are "seven
    # times" single precision on a V100 (Markidis et al., "NVIDIA tensor core programmability, performance and
    # precision", 2018): 11.9 of 14.0 Tflop/s.
    product: float = 0.85
    # Of the peak rate, a convolution's products, direct or Winograd's. Fitted on published training rates, TensorFlow's
    # "Benchmarks" (2017), P100, one GPU, synthetic data: the value that makes the geometric mean of computed over
    # published rate 1 over Inception-v3, ResNet-50, ResNet-152 and VGG-16.
    convolution: float = 0.49
    # Of tensor cores' peak rate, a matrix product that fills the device. Published: 83 of 112 Tflop/s (Markidis et al.,
    # above). Convolutions are assumed to reach the same fraction as without tensor cores.
    tensor_product: float = 0.74
    # Of the peak bandwidth, a kernel that streams: elementwise, normalisation, softmax, pooling, gather and scatter,
    # Winograd's transforms. Published: 790 of 900 GB/s on a V100 (cudaMemcpy; paranumal.com, "Rough-n-Ready Roofline:
    # NVIDIA V100 edition"). Assumed for the other devices.
    memory: float = 0.88
    # Seconds that the host needs to issue a kernel inside a library that issues many (cuDNN's recurrent layers).
    # Assumed: the bare launch is about 4 us.
    library_launch_s: float = 4e-6


SHIPPED = Efficiencies()
