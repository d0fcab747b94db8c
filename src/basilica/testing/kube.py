"""The test cluster is a distribution of its own."""

raise ImportError(
    "The test cluster is not part of basilica: run 'pip install basilica-testkube', "
    "and import from 'basilica_testkube' what you imported from 'basilica.testing.kube'."
)
