// The C interface that Python calls through ctypes. One handle is one loaded model; a handle is used by one caller at
// a time. Nothing here throws.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DRAGOMAN_F32 = 0, DRAGOMAN_F16 = 1, DRAGOMAN_Q8_0 = 2, DRAGOMAN_Q4_1 = 3, DRAGOMAN_Q4_0 = 4 };

// Matrices: layer < 0 for the embedding and the head.
enum { DRAGOMAN_Q, DRAGOMAN_K, DRAGOMAN_V, DRAGOMAN_O, DRAGOMAN_GATE, DRAGOMAN_UP, DRAGOMAN_DOWN, DRAGOMAN_NUM_MATRICES };
enum { DRAGOMAN_EMBED, DRAGOMAN_HEAD };
// Vectors: layer < 0 for the final norm (index 0).
enum { DRAGOMAN_INPUT_NORM, DRAGOMAN_POST_NORM, DRAGOMAN_Q_NORM, DRAGOMAN_K_NORM, DRAGOMAN_NUM_VECTORS };

typedef struct {
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size, max_context_tokens;
  int32_t num_blocks, page_size, num_threads, max_batch_tokens, max_num_seqs, int8_activations;
  float rms_norm_eps, rope_attention_factor;
} dragoman_llama_config;

typedef struct {
  int32_t num_tokens, num_seqs, max_num_blocks, num_logit_seqs, num_hidden_seqs, num_hidden_rows;
  const int32_t *token_ids, *positions, *slot_mapping, *query_starts, *context_lens, *block_tables;
  const int32_t *logit_seqs, *hidden_seqs, *hidden_rows;  // hidden_rows: query tokens
} dragoman_llama_batch;

// What run() refused: which array, where, the value, and the bound or expected value it missed.
enum {
  DRAGOMAN_OK,
  DRAGOMAN_BAD_QUERY_STARTS,
  DRAGOMAN_BAD_TOKEN_ID,
  DRAGOMAN_BAD_CONTEXT_LEN,
  DRAGOMAN_BAD_POSITION,
  DRAGOMAN_BAD_BLOCK,
  DRAGOMAN_BAD_SLOT,
  DRAGOMAN_SHARED_SLOT,
  DRAGOMAN_BAD_LOGIT_SEQ,
  DRAGOMAN_BAD_HIDDEN_SEQ,
  DRAGOMAN_NO_MEMORY,
  DRAGOMAN_BAD_HIDDEN_ROW
};
typedef struct {
  int32_t code, row, column, value, expected;
} dragoman_llama_report;

const char* dragoman_simd_name(void);
void* dragoman_llama_create(const dragoman_llama_config* config, const float* inverse_frequencies);  // NULL: no memory
int dragoman_llama_set_matrix(void* handle, int layer, int index, int dtype, int rows, int cols, const void* rows_data);
int dragoman_llama_set_bias(void* handle, int layer, int index, int count, const float* values);
int dragoman_llama_set_vector(void* handle, int layer, int index, int count, const float* values);
// Checks the whole batch before anything is written. logits [num_logit_seqs, vocab_size],
// hidden [num_hidden_seqs + num_hidden_rows, hidden_size], after the final norm.
int dragoman_llama_run(void* handle, const dragoman_llama_batch* batch, float* logits, float* hidden,
                       dragoman_llama_report* report);
// Logits [count, vocab_size] of hidden rows [count, hidden_size] that run() gave; count is at most max_num_seqs or 64,
// whichever is more.
void dragoman_llama_head(void* handle, int count, const float* hidden, float* logits);
// KV blocks whole: a block is [layer][k, v] pages as the cache keeps them, dragoman_llama_block_bytes() in all. Block ids are
// checked by the caller.
int64_t dragoman_llama_block_bytes(void* handle);
void dragoman_llama_read_blocks(void* handle, int count, const int32_t* blocks, void* data);
void dragoman_llama_write_blocks(void* handle, int count, const int32_t* blocks, const void* data);
void dragoman_llama_destroy(void* handle);

#ifdef __cplusplus
}
#endif
