"""Linen modules: the parameters around the pure functions of `dpjax.ops`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.layers.attention import LocalAttention as LocalAttention
  from dpjax.layers.attention import RelativeAttention as RelativeAttention
  from dpjax.layers.attention import SelfAttention as SelfAttention
  from dpjax.layers.block import Block as Block
  from dpjax.layers.block import FeedForward as FeedForward
  from dpjax.layers.boundaries import Boundaries as Boundaries
  from dpjax.layers.boundaries import BoundaryOutput as BoundaryOutput
  from dpjax.layers.boundaries import Fixed as Fixed
  from dpjax.layers.boundaries import SpaceByte as SpaceByte
  from dpjax.layers.boundaries import StageOutput as StageOutput
  from dpjax.layers.boundaries import Whitespace as Whitespace
  from dpjax.layers.common import Norm as Norm
  from dpjax.layers.common import check_settings as check_settings
  from dpjax.layers.common import linear as linear
  from dpjax.layers.common import symmetric_uniform as symmetric_uniform
  from dpjax.layers.dispatcher import Dispatcher as Dispatcher
  from dpjax.layers.dispatcher import MultiHeadDispatcher as MultiHeadDispatcher
  from dpjax.layers.embeddings import TokenAndPosition as TokenAndPosition
  from dpjax.layers.extractors import HE as HE
  from dpjax.layers.extractors import ME as ME
  from dpjax.layers.extractors import SHE as SHE
  from dpjax.layers.extractors import WE as WE
  from dpjax.layers.learned_boundaries import EntropySpikes as EntropySpikes
  from dpjax.layers.learned_boundaries import EntropyThreshold as EntropyThreshold
  from dpjax.layers.learned_boundaries import FlexiTokens as FlexiTokens
  from dpjax.layers.learned_boundaries import Gumbel as Gumbel
  from dpjax.layers.learned_boundaries import Routing as Routing
  from dpjax.layers.learned_boundaries import Unigram as Unigram
  from dpjax.layers.mamba2 import Mamba2 as Mamba2
  from dpjax.layers.mixer import Context as Context
  from dpjax.layers.mixer import Mixer as Mixer
  from dpjax.layers.segment_readers import NullGroup as NullGroup
  from dpjax.layers.segment_readers import SegmentReader as SegmentReader
  from dpjax.layers.segment_readers import Smoothing as Smoothing
  from dpjax.layers.short_convolution import ShortConvolution as ShortConvolution
  from dpjax.text.boundaries import TextBoundaries as TextBoundaries
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
