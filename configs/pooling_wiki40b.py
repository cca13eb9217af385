"""Dynamic token pooling on Wikipedia in four languages (pooling paper, Table 1).

  python train.py --config=configs/pooling_wiki40b.py:fi,unigram --workdir=runs/fi_unigram
  python train.py --config=configs/pooling_wiki40b.py:vi,gumbel,tiny --workdir=runs/tiny

After the colon, separated by commas: a language, en (English, the default), fi (Finnish),
he (Hebrew) or vi (Vietnamese), and the options of configs/pooling_text8.py. The paper's
choices for each:

      unigram pieces     gumbel boundaries per character
  en  10,000             0.2
  fi  200                0.37
  he  200                0.2
  vi  10,000             0.2

Downloads the beginning of wiki40b in the language (en: about 1 GB of 6; the others: less)
into data/ and cleans it like text8: only the language's letters, space and line end, in
lower case, digits spelt out in the language, structure markers replaced by line ends,
look-alike letters folded (except in Hebrew), Hebrew without diacritics, runs of spaces
collapsed. The first 400M characters of the train split are taken, and the first 2M of
the others. --config.data.path reads another text file or a folder with
{train,valid,test}.txt, which `python -m dpjax_papers.cleaning fi` cleans in the same way.

Model, training and reports are those of configs/pooling_text8.py.

Parameters:      41M, with a predictor 42M
Hardware, hours: the paper's two GeForce RTX 3080, 12 to 30 hours; ours not yet timed
Bits per character and shortening factor of the test split, from the paper (*: better than
none and fixed, p < 0.05 in a paired t-test over 3 seeds); ours not yet measured:

              en           fi           he           vi
  none        1.091   1.0  0.945   1.0  1.274   1.0  1.065   1.0
  fixed2      1.084   2.0  0.946   2.0  1.279   2.0  1.060   2.0
  fixed3      1.093   3.0  0.951   3.0  1.290   3.0  1.068   3.0
  fixed4      1.102   4.0  0.961   4.0  1.304   4.0  1.087   4.0
  gumbel      1.080   4.7  0.941   2.6  1.281   4.7  1.061   4.3
  entropy     1.083   4.1  0.949   4.1  1.276   3.6  1.072   4.2
  unigram     1.078*  5.0  0.937   2.1  1.270*  1.9  1.058   4.0
  whitespace  1.077*  5.6  0.955   7.9  1.284   3.8  1.057*  4.4
"""

from configs import pooling_text8
from configs.pooling_text8 import Text

TEXTS = {
  "en": Text("wiki40b_en"),
  "fi": Text("wiki40b_fi", unigram_size=200, prior=0.37, prompt="suomen historia"),
  "he": Text("wiki40b_he", unigram_size=200, prompt=""),
  "vi": Text("wiki40b_vi", prompt="lịch sử"),
}


def get_config(variant: str = ""):
  return pooling_text8.configure(variant, TEXTS)
