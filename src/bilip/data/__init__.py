"""Where x comes from: arrays and files, toy data, images, noise."""

from bilip.data.batches import ImageBatches, seed_of
from bilip.data.convert import as_source
from bilip.data.dequantize import Cell, cell, dequantize
from bilip.data.image_sets import IMAGE_SETS, ImageSet, data_folder, image_set, prepare_images
from bilip.data.images import Images, cifar10, load_images
from bilip.data.noise import NOISE_NAMES, noise
from bilip.data.source import Batch, Source, Statistics
from bilip.data.toy import checkerboard, gaussians, two_moons

__all__ = [
    "IMAGE_SETS",
    "NOISE_NAMES",
    "Batch",
    "Cell",
    "ImageBatches",
    "ImageSet",
    "Images",
    "Source",
    "Statistics",
    "as_source",
    "cell",
    "checkerboard",
    "cifar10",
    "data_folder",
    "dequantize",
    "gaussians",
    "image_set",
    "load_images",
    "noise",
    "prepare_images",
    "seed_of",
    "two_moons",
]
