"""The generated corpus: images of coloured shapes, captions and every other task's samples.

Import from the modules (`vlp.scenes.sample.sample_scene`, `.captions.captions`, ...): several
functions share their module's name, so nothing is lifted up here.
"""
