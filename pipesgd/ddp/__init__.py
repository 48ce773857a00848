"""The method inside a program that trains with torch's DistributedDataParallel.

``attach`` brings all of Pipe-SGD: late gradients, their compression, and the prediction. ``compress`` is for programs
that refuse staleness: each bucket is summed in its own iteration, with a codec on the wire. ``SliceSampler`` gives each
rank its batches, and completes an epoch that another number of ranks resumes.
"""

from pipesgd.data.sampler import SliceSampler
from pipesgd.ddp.attached import AttachedPipeline, attach
from pipesgd.ddp.compressed import CompressedBuckets, compress
from pipesgd.ddp.local_steps import AttachedLocalSteps

__all__ = ["AttachedLocalSteps", "AttachedPipeline", "CompressedBuckets", "SliceSampler", "attach", "compress"]
