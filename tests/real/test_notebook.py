"""The quick-start notebook, from top to bottom in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SHORTER = "STEPS, GAMES = 1, 2"


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells as they stand; one more, after the cell of parameters, makes it short."""
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [parameters] = [
        place
        for place, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    notebook.cells.insert(parameters + 1, nbformat.v4.new_code_cell(SHORTER))
    client = NotebookClient(
        notebook,
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
        km=AsyncKernelManager(transport="ipc", ip=str(tmp_path / "kernel")),
    )
    client.execute(cleanup_kc=True)
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    print(printed)
    assert "tic-tac-toe/quickstart is at step 0" in printed
    assert "step 2: mean reward" in printed
    assert "won before: " in printed
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
