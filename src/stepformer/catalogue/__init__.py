"""What has a name: presets, sizes, recipes, references."""

from stepformer.catalogue.lookup import (
    SIZES,
    Preset,
    build,
    citations,
    closest_preset,
    layer_equation,
    load_config,
    model_config,
    preset,
    preset_of,
    presets,
    register_preset,
    size_settings,
    unlisted_templates,
)

__all__ = ["SIZES", "Preset", "build", "citations", "closest_preset", "layer_equation", "load_config", "model_config"]
__all__ += ["preset", "preset_of", "presets", "register_preset", "size_settings", "unlisted_templates"]
