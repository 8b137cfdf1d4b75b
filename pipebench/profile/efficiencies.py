"""Every constant of the analytic profile but the devices' own peaks, each with its source.

Those of the papers' devices (`SHIPPED`) are published or fitted on published rates, never on the profiles that they are
judged on (`reports/analytic_profile.md`). Comments on those of Ampere and Hopper say what is published and what is
fitted on which profiles; `reports/gpu_efficiencies.md` judges the fitted ones by leaving each of these profiles out.
"""

from dataclasses import dataclass, replace

# Winograd's F(4x4, 3x3), which cuDNN runs for 3x3 convolutions of stride 1 as three passes: a tile of 4x4 outputs takes
# 6x6 products per channel pair instead of 16 * 9. Published: Lavin and Gray, "Fast algorithms for convolutional neural
# networks" (2016).
WINOGRAD_TILE, WINOGRAD_PATCH, WINOGRAD_KERNEL = 4, 6, 3
# A matrix product is cut into tiles. A multiprocessor computes one at a time, so that the last tiles may leave most of
# the device idle. Published: NVIDIA, "Matrix multiplication background user's guide", tile and wave quantization; of
# its tile sizes these are the ones that 32-bit kernels have (`sgemm_128x128`, `128x64`, `64x64`). Assumed: all sizes
# reach one rate, and the inner dimension may be split in so many parts to fill the device.
TILES = ((128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8, 16)
# Seconds that the host needs to issue one kernel, if the cluster doesn't say. Assumed: eager PyTorch issues about
# 100,000 operations per second. Its users measured 7 us in 2020 for the simplest operation that autograd records,
# without a kernel (pytorch/pytorch, issue 41383).
LAUNCH_S = 1e-5
# The direct algorithm's multiplications over Winograd's: 4.
WINOGRAD_GAIN = WINOGRAD_TILE**2 * WINOGRAD_KERNEL**2 / WINOGRAD_PATCH**2
# Of Hopper's 32-bit convolutions, both fitted on the profiles below: the least rows of pixels for which gradients of
# inputs take Winograd's algorithm, and the input channels below which a part of the arithmetic is unused.
WINOGRAD_ROWS, MIN_CHANNELS = 16, 8


@dataclass(frozen=True)
class Convolutions:
    """Fractions of the peaks that cuDNN's 32-bit convolutions reach, for devices where each product was measured.

    If cuDNN may not try algorithms (`engine.deterministic`), it takes those that its rules name, often not the fastest.
    Its deterministic gradients are bound by how few blocks may sum an element, not by arithmetic.
    """

    # Of the peak rate: any product by the direct algorithm; a gradient by Winograd's reaches 4 times that
    direct: float
    winograd_forward: float  # of the peak rate: a forward by Winograd's, counting the direct algorithm's operations
    forward_memory: float  # of the peak bandwidth: the bytes that a forward reads and writes
    input_memory: float  # of the peak bandwidth: those of the product that gives the gradient of the input
    strided_input_memory: float  # of the peak bandwidth: the same where the stride isn't 1
    weight_memory: float  # of the peak bandwidth: those of the product that gives the gradient of the weights
    gradients: float = 1.0  # factor on the seconds of both gradients


@dataclass(frozen=True)
class Efficiencies:
    """The fraction of a device's peak that each kind of operation reaches, and the seconds of a library's launch."""

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
    # Of tensor cores' peak rate, a convolution's products. None: `convolution`.
    tensor_convolution: float | None = None
    # Of tensor cores' peak rate in TF32, a convolution's products. None: `convolution`. Matrix products in TF32 are
    # assumed to reach `tensor_product`.
    tf32_convolution: float | None = None
    normalisation: float | None = None  # of the peak bandwidth, batch normalisation. None: `memory`.
    pooling_backward: float | None = None  # of the peak bandwidth, the backward of pooling. None: `memory`.
    # 32-bit convolutions product by product. None: `convolution`, by the faster algorithm.
    convolutions: Convolutions | None = None

    def not_deterministic(self) -> "Efficiencies":
        """Return the fractions where nondeterministic kernels may run."""
        if self.convolutions is None:
            return self
        return replace(self, convolutions=replace(self.convolutions, gradients=FREE_GRADIENTS))


SHIPPED = Efficiencies()
# Time of nondeterministic gradients of 32-bit convolutions over that of deterministic ones. Fitted on whole steps of
# VGG-16 and ResNet-50 on an H100, with and without: see `reports/gpu_efficiencies.md`.
FREE_GRADIENTS = 0.7
HOPPER = Efficiencies(
    # Published: 792 of 989 Tflop/s, the best of many shapes in bf16 (Bekman, "Machine learning engineering", table
    # "Maximum achievable matmul FLOPS": H100 SXM, CUDA 12.1).
    tensor_product=0.80,
    # Fitted on two published rates of an A100: NVIDIA, DeepLearningExamples, ResNet-50 v1.5 for PyTorch, container
    # 21.03, one GPU: 2470 images/s in mixed precision, 938 in TF32. Assumed to hold on Hopper.
    tensor_convolution=0.60,
    tf32_convolution=0.275,
    # All fitted on three profiles measured on an H100: AlexNet, VGG-16 and ResNet-50, 64 images, fp32, deterministic.
    # `memory` keeps the published 0.88; measured there: 0.89 (ReLU of 822 MB). Embeddings and recurrent layers weren't
    # measured; their bytes are taken at `memory`, their products at the fractions above.
    convolutions=Convolutions(
        direct=0.45,
        winograd_forward=0.6,
        forward_memory=0.265,
        input_memory=0.12,
        strided_input_memory=0.023,
        weight_memory=0.07,
    ),
    # Fitted on the same profiles: batch normalisation of ResNet-50, the backward of max pooling of VGG-16.
    normalisation=0.6,
    pooling_backward=0.45,
)
AMPERE = replace(
    HOPPER,
    # Published: 17.7 of 19.5 Tflop/s by an open library that reaches 0.94 of cuBLAS (AG0708/sgBLAS, release 0.1.0).
    product=0.91,
    # Published: 268 of 312 Tflop/s, same table as Hopper's.
    tensor_product=0.86,
)
