"""Package metadata of megatron_upipe; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

VERSION = "0.1.0"

EXTRAS = {
    "te": ["transformer-engine[pytorch]>=2.20"],
    "flash": ["flash-attn>=2.7"],
    "plot": ["matplotlib>=3.8"],
    "hf": ["transformers>=4.51", "safetensors>=0.4"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "hypothesis>=6.100",
        "ruff>=0.6",
        "matplotlib>=3.8",
    ],
}

setup(
    name="megatron-upipe",
    version=VERSION,
    description="UPipe (headwise-chunked Ulysses) context parallelism for Megatron-LM, for millions of tokens",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_upipe", "megatron_upipe.*"]),
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.18,<0.20",
        "numpy",
        "packaging",
        "einops>=0.8",
        "psutil",
        "pyyaml",  # the training loop of megatron-core 0.18 imports it and does not say so
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-upipe = megatron_upipe.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Intended Audience :: Science/Research",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
