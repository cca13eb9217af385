"""The settings of a run, and of each component."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.config.loading import apply_variant as apply_variant
  from dpjax.config.loading import from_dict as from_dict
  from dpjax.config.loading import load as load
  from dpjax.config.rules import check as check
  from dpjax.config.rules import check_ids as check_ids
  from dpjax.config.rules import check_model as check_model
  from dpjax.config.rules import check_sampling as check_sampling
  from dpjax.config.rules import check_seed as check_seed
  from dpjax.config.rules import idle_mixers as idle_mixers
  from dpjax.config.rules import stage_multipliers as stage_multipliers
  from dpjax.config.rules import steps_in as steps_in
  from dpjax.config.schema import Data as Data
  from dpjax.config.schema import Eval as Eval
  from dpjax.config.schema import Sample as Sample
  from dpjax.config.schema import Train as Train
  from dpjax.config.sections import boundaries as boundaries
  from dpjax.config.sections import default as default
  from dpjax.config.sections import default_model as default_model
  from dpjax.config.sections import differences as differences
  from dpjax.config.sections import fill as fill
  from dpjax.config.sections import flatten as flatten
  from dpjax.config.sections import get as get
  from dpjax.config.sections import in_turn as in_turn
  from dpjax.config.sections import is_pooled as is_pooled
  from dpjax.config.sections import middle as middle
  from dpjax.config.sections import mixer as mixer
  from dpjax.config.sections import mixer_names as mixer_names
  from dpjax.config.sections import mixers_in as mixers_in
  from dpjax.config.sections import optimizer as optimizer
  from dpjax.config.sections import schedule as schedule
  from dpjax.config.sections import stages_in as stages_in
  from dpjax.config.sections import tokenizer as tokenizer
  from dpjax.config.sections import walk as walk
  from dpjax.config.setting import ConfigDict as ConfigDict
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
