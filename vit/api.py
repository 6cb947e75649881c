"""The public names: `vit.train(…)`, `vit.evaluate(…)` and so on. Each is a line here.

`vit` imports a name from its module on first use, not this file.
"""

from vit.analysis.audit.run import audit as audit
from vit.analysis.compare.comparison import compare as compare
from vit.analysis.faithfulness.measure import measure_faithfulness as measure_faithfulness
from vit.analysis.robustness.measure import measure_robustness as measure_robustness
from vit.bundle import Bundle as Bundle
from vit.bundle import load_bundle as load_bundle
from vit.data.preprocess import Preprocess as Preprocess
from vit.deploy.export.export_model import export_model as export_model
from vit.evaluation.evaluate import evaluate as evaluate
from vit.explanation.capture.forward import capture_attention as capture_attention
from vit.explanation.explain import explain as explain
from vit.explanation.methods.maps import Method as Method
from vit.explanation.methods.maps import attribute as attribute
from vit.explanation.methods.rollout import attention_rollout as attention_rollout
from vit.model.modules import load_timm as load_timm
from vit.model.vision_transformer import VisionTransformer as VisionTransformer
from vit.prediction.predict import embed as embed
from vit.prediction.predict import predict as predict
from vit.prediction.predictor import Predictor as Predictor
from vit.training.observers import Observer as Observer
from vit.training.train_model import train as train
