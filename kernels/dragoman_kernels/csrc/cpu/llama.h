// State of one loaded Llama-family model: weights, paged KV cache, scratch rows, threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "matrix.h"
#include "team.h"

namespace dragoman {

struct Layer {
  Matrix matrices[DRAGOMAN_NUM_MATRICES];
  std::vector<float> vectors[DRAGOMAN_NUM_VECTORS];
};

// Query rows of one sequence (query token x head of a group) that one attention item handles for one kv head.
struct AttentionTile {
  int seq, first, count;
};

constexpr int kPrivateRows = 2;
constexpr int kMinHeadRows = 64;  // rows run_head() takes whatever max_num_seqs is

struct Llama {
  dragoman_llama_config config;
  std::vector<float> inverse_frequencies;
  std::vector<Layer> layers;
  Matrix embedding, head;
  std::vector<float> final_norm;

  // [layer][block][kv head][dim][token] and [layer][block][kv head][token][dim]: fp32 on the float32 road, which must
  // equal an fp32 reference; half on the int8 road, where activations carry 8 bits and context bandwidth counts.
  Buffer<float> keys32, values32;
  Buffer<uint16_t> keys16, values16;

  Activations normed, attended, gated, last;
  // A thread's own normed rows: in a small step each thread norms all rows itself, which is cheaper than a barrier.
  std::vector<Activations> private_normed;
  Buffer<float> residual;  // [tokens, hidden]
  Buffer<float> qkv;       // [tokens, (heads + 2 kv heads) * head_dim]
  Buffer<float> rotary;    // [tokens, head_dim]: cosines then sines
  std::vector<AttentionTile> tiles;
  std::vector<int32_t> last_rows;     // rows whose final norm is wanted: logits first, then hidden
  std::vector<int32_t> block_writer;  // [blocks] sequence that writes the block in this step, else -1
  bool independent = false;           // every sequence has one query token and reads no block another one writes
  std::unique_ptr<Team> team;

  explicit Llama(const dragoman_llama_config& config, const float* inverse_frequencies);

  int q_cols() const { return config.num_heads * config.head_dim; }
  int kv_cols() const { return config.num_kv_heads * config.head_dim; }
  int qkv_cols() const { return q_cols() + 2 * kv_cols(); }
  const Matrix& output_head() const { return head.data ? head : embedding; }
};

// Fills `report` and returns its code; changes only `model.block_writer` and `model.independent`.
int check_batch(Llama& model, const dragoman_llama_batch& batch, dragoman_llama_report& report);

// Runs a checked batch.
void run_step(Llama& model, const dragoman_llama_batch& batch, float* logits, float* hidden);

// Logits of normed hidden rows.
void run_head(Llama& model, int count, const float* hidden, float* logits);

}  // namespace dragoman
