"""Does the dataset fit the target: ids, mask token, supervision, lengths, layer numbers, and the batches made of it.

Ids are scanned whole (2 GB/s); rows are compared on a few of them.
"""

from collections.abc import Sequence

import numpy as np

from dflash_nb.analysis.doctor.check import Finding, check, look, ok, stop
from dflash_nb.data.dataset import Batch, TokenDataset
from dflash_nb.data.source import DatasetError
from dflash_nb.model.target_info import TargetError, TargetInfo, check_layer_ids, default_layer_ids

UNSUPERVISED_SHARE = 0.05
ANY_ID = np.iinfo(np.int64).max


@check("tokenizer")
def tokenizer(dataset: TokenDataset, info: TargetInfo) -> Finding:
    """Were the ids made with the target's own tokenizer?"""
    made_by, own = (dataset.tokenizer or {}).get("fingerprint"), info.tokenizer_fingerprint
    if not made_by or not own:
        return ok("not recorded on both sides, 0 fingerprints to compare")
    if made_by != own:
        name = dataset.tokenizer.get("name")
        return stop(
            f"data made with {name} ({made_by}), target {info.name} has {own}",
            f"prepare the data again with --tokenizer {info.name}, or choose the target it was made for",
        )
    return ok(f"fingerprint {own} on both sides")


@check("vocabulary")
def vocabulary(splits: Sequence[TokenDataset], info: TargetInfo) -> Finding:
    """Has every id of the data a row in the target's embedding, and a token?"""
    advice = f"prepare the data with the tokenizer of target {info.name}"
    rows = sum(len(split) for split in splits)
    for split in splits:
        try:
            split.check_vocabulary(info.vocab_size)
        except DatasetError as error:
            return stop(str(error), advice)
        try:
            split.check_vocabulary(info.valid_vocab)
        except DatasetError:
            padding = info.vocab_size - info.valid_vocab
            return look(f"{split.path} holds ids among the {padding} padding rows from {info.valid_vocab} on, which no token has", advice)
    return ok(f"all ids of {rows:,} rows are below {info.valid_vocab:,}, the embedding has {info.vocab_size:,} rows")


@check("mask token")
def mask_token(splits: Sequence[TokenDataset], info: TargetInfo, mask_token_id: int | None) -> Finding:
    """Is the mask token an id that nothing else uses?"""
    advice = "set mask_token to a reserved id that never occurs in the data"
    if mask_token_id is None:
        return stop("0 files of the target name a mask token", advice)
    if not 0 <= mask_token_id < info.vocab_size:
        return stop(f"id {mask_token_id} has no row in an embedding of {info.vocab_size:,}", advice)
    roles = {"pad": (info.pad_token_id,), "end": info.eos_token_ids, "begin": (info.bos_token_id,)}
    if taken := [role for role, ids in roles.items() if mask_token_id in ids]:
        return stop(f"id {mask_token_id} is also the {' and '.join(taken)} token", advice)
    for split in splits:
        try:
            split.check_vocabulary(ANY_ID, mask_token_id)
        except DatasetError as error:
            return stop(str(error), advice)
    return ok(f"id {mask_token_id} occurs in 0 of {sum(len(split) for split in splits):,} rows")


@check("supervision")
def supervision(dataset: TokenDataset) -> Finding:
    """How much of the data is supervised, and does the count column say what the masks say?"""
    try:
        counts, lengths = dataset.n_supervised, dataset.lengths
    except DatasetError as error:
        return stop(str(error), "write loss_mask and n_supervised again")
    advice = "prepare the data again; the chat template may not mark assistant text, or answers may be cut off"
    share, without = counts.sum() / lengths.sum(), int((counts < 2).sum())
    evidence = f"{share:.1%} of {int(lengths.sum()):,} tokens supervised; {without:,} of {len(dataset):,} rows give no block"
    if without == len(dataset):
        return stop(evidence, advice)
    if without > UNSUPERVISED_SHARE * len(dataset):
        return look(f"{evidence}, more than {UNSUPERVISED_SHARE:.0%}", advice)
    return ok(evidence)


@check("buckets")
def cuts(note: str) -> Finding:
    """Were the cuts of a file made for this dataset and these limits? ``note`` says what is not so."""
    if not note:
        return ok("0 differences between what the cuts were made for and this run")
    evidence, _, advice = note.partition(". ")
    return look(evidence, advice)


@check("lengths")
def lengths(lengths: np.ndarray, max_positions: int, limit: int, too_long: str) -> Finding:
    """Do all rows fit the batches (``limit`` tokens, else ``too_long`` applies) and the positions that the target knows?"""
    over, longest = int((lengths > limit).sum()), int(lengths.max())
    evidence = f"longest row {longest:,}, limit {limit:,}, target's positions {max_positions:,}"
    if over == len(lengths) and too_long == "drop":
        return stop(f"all {over:,} rows are longer than {limit:,} tokens and would be dropped", "raise token_budget or max_length")
    if over and too_long == "error":
        return stop(
            f"{evidence}; {over:,} rows are over the limit", "raise token_budget or max_length, or set too_long to drop or truncate"
        )
    kept = lengths[lengths <= limit] if too_long == "drop" else np.minimum(lengths, limit)
    if beyond := int((kept > max_positions).sum()):
        return stop(
            f"{evidence}; {beyond:,} rows go beyond the positions", f"set max_length {max_positions} and too_long to drop or truncate"
        )
    if over:
        return look(
            f"{evidence}; {over:,} rows ({over / len(lengths):.1%}) are over the limit: {too_long}", "raise max_length to keep them"
        )
    return ok(evidence)


@check("layer ids")
def layers(info: TargetInfo, ids: Sequence[int] | None, count: int) -> Finding:
    """Are ``ids``, or the usual ``count`` ones, different layers of the target in increasing order?"""
    try:
        chosen = default_layer_ids(info.num_layers, count) if ids is None else check_layer_ids(ids, info.num_layers)
    except TargetError as error:
        return stop(str(error), f"set target_layers to different numbers from 0 to {info.num_layers - 1}, in increasing order")
    return ok(f"outputs of layers {', '.join(map(str, chosen))} of {info.num_layers} (counted from 0)")


@check("batch rows")
def batch_rows(dataset: TokenDataset, batch: Batch) -> Finding:
    """Does a collated batch hold the dataset's rows on the left and unsupervised padding on the right?"""
    advice = "pad on the right (padding_side right): recurrent layers and positions count from the first column"
    for b, (i, length) in enumerate(zip(batch.sample_ids_B.tolist(), batch.lengths_B.tolist(), strict=True)):
        ids, mask = dataset.row(i)
        wrong = np.flatnonzero((batch.input_ids_BT[b, :length] != ids[:length]) | (batch.loss_mask_BT[b, :length] != mask[:length]))
        if wrong.size:
            return stop(f"{wrong.size} of {length} tokens of row {i} are not where they belong, from column {wrong[0]} on", advice)
        if supervised := int(batch.loss_mask_BT[b, length:].sum()):
            return stop(f"{supervised} padding positions of row {i} are supervised", "clear the loss mask past a row's length")
    return ok(f"{batch.rows} rows of {batch.lengths_B.min()} to {batch.lengths_B.max()} tokens, padded right to {batch.padded_length}")
