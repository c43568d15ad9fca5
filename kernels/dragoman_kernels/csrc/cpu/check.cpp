#include "llama.h"

namespace dragoman {
namespace {

int refuse(dragoman_llama_report& report, int code, int row, int column, int value, int expected) {
  report = {code, row, column, value, expected};
  return code;
}

bool inside(int value, int low, int high) { return value >= low && value < high; }

int check_sequence(Llama& model, const dragoman_llama_batch& batch, int seq, dragoman_llama_report& report) {
  const dragoman_llama_config& c = model.config;
  const int page = c.page_size, first = batch.query_starts[seq], last = batch.query_starts[seq + 1];
  const int length = batch.context_lens[seq], limit = std::min<int64_t>(c.max_context_tokens, int64_t(batch.max_num_blocks) * page);
  if (!inside(length, last - first, limit + 1)) return refuse(report, DRAGOMAN_BAD_CONTEXT_LEN, seq, 0, length, limit);
  const int32_t* table = batch.block_tables + size_t(seq) * batch.max_num_blocks;
  for (int b = 0; b < (length + page - 1) / page; ++b)
    if (!inside(table[b], 1, c.num_blocks)) return refuse(report, DRAGOMAN_BAD_BLOCK, seq, b, table[b], c.num_blocks);
  for (int t = first; t < last; ++t) {
    const int position = length - last + t;
    if (batch.positions[t] != position) return refuse(report, DRAGOMAN_BAD_POSITION, t, 0, batch.positions[t], position);
    const int64_t slot = int64_t(table[position / page]) * page + position % page;
    if (batch.slot_mapping[t] != slot) return refuse(report, DRAGOMAN_BAD_SLOT, t, 0, batch.slot_mapping[t], int(slot));
    int32_t& writer = model.block_writer[table[position / page]];
    if (writer >= 0 && writer != seq) return refuse(report, DRAGOMAN_SHARED_SLOT, t, writer, batch.slot_mapping[t], seq);
    writer = seq;
  }
  return DRAGOMAN_OK;
}

// Whether each sequence may write and read its context without waiting for the others.
bool independent(const Llama& model, const dragoman_llama_batch& batch) {
  if (batch.num_tokens != batch.num_seqs) return false;
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int32_t* table = batch.block_tables + size_t(seq) * batch.max_num_blocks;
    for (int b = 0; b <= (batch.context_lens[seq] - 1) / model.config.page_size; ++b) {
      const int writer = model.block_writer[table[b]];
      if (writer >= 0 && writer != seq) return false;
    }
  }
  return true;
}

}  // namespace

int check_batch(Llama& model, const dragoman_llama_batch& batch, dragoman_llama_report& report) {
  const dragoman_llama_config& c = model.config;
  if (batch.query_starts[0] != 0) return refuse(report, DRAGOMAN_BAD_QUERY_STARTS, 0, 0, batch.query_starts[0], 0);
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int next = batch.query_starts[seq + 1];
    if (next <= batch.query_starts[seq] || next > batch.num_tokens)
      return refuse(report, DRAGOMAN_BAD_QUERY_STARTS, seq + 1, 0, next, batch.num_tokens);
  }
  if (batch.query_starts[batch.num_seqs] != batch.num_tokens)
    return refuse(report, DRAGOMAN_BAD_QUERY_STARTS, batch.num_seqs, 0, batch.query_starts[batch.num_seqs], batch.num_tokens);
  for (int t = 0; t < batch.num_tokens; ++t)
    if (!inside(batch.token_ids[t], 0, c.vocab_size))
      return refuse(report, DRAGOMAN_BAD_TOKEN_ID, t, 0, batch.token_ids[t], c.vocab_size);
  for (int i = 0; i < batch.num_logit_seqs; ++i)
    if (!inside(batch.logit_seqs[i], 0, batch.num_seqs))
      return refuse(report, DRAGOMAN_BAD_LOGIT_SEQ, i, 0, batch.logit_seqs[i], batch.num_seqs);
  for (int i = 0; i < batch.num_hidden_seqs; ++i)
    if (!inside(batch.hidden_seqs[i], 0, batch.num_seqs))
      return refuse(report, DRAGOMAN_BAD_HIDDEN_SEQ, i, 0, batch.hidden_seqs[i], batch.num_seqs);
  for (int i = 0; i < batch.num_hidden_rows; ++i)
    if (!inside(batch.hidden_rows[i], 0, batch.num_tokens))
      return refuse(report, DRAGOMAN_BAD_HIDDEN_ROW, i, 0, batch.hidden_rows[i], batch.num_tokens);

  std::fill(model.block_writer.begin(), model.block_writer.end(), -1);
  for (int seq = 0; seq < batch.num_seqs; ++seq)
    if (const int code = check_sequence(model, batch, seq, report)) return code;
  model.independent = independent(model, batch);
  return DRAGOMAN_OK;
}

}  // namespace dragoman
