"""The package's connections, one file each.

Those that act between the same layers do so in this order, which is part of what a checkpoint computes.
"""

# ruff: isort: skip_file
from resformer.modeling.connection import KINDS as KINDS
from resformer.modeling.connection import Connection as Connection
from resformer.modeling.connections import delta_attention_residuals as delta_attention_residuals
from resformer.modeling.connections import attnres as attnres
from resformer.modeling.connections import backout as backout
from resformer.modeling.connections import hyper_connections as hyper_connections
from resformer.modeling.connections import depth_average as depth_average
from resformer.modeling.connections import value_residual as value_residual
from resformer.modeling.connections import depth_attention as depth_attention
from resformer.modeling.connections import embedding_residual as embedding_residual
from resformer.modeling.connections import neutreno as neutreno
from resformer.modeling.connections import sharing as sharing
from resformer.modeling.connections import value_embedding as value_embedding
from resformer.modeling.connections import mudd as mudd
