"""What a source says at one time, and the names of everything that can be said."""

from .glossary import METRICS as METRICS
from .glossary import Metric as Metric
from .reading import Reading as Reading
from .reading import ReadingBuilder as ReadingBuilder
from .reading import Sample as Sample
