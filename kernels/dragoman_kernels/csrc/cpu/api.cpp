#include "api.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

#include "llama.h"

namespace dragoman {

Llama::Llama(const dragoman_llama_config& shape, const float* frequencies)
    : config(shape), inverse_frequencies(frequencies, frequencies + shape.head_dim / 2), layers(shape.num_layers) {
  const size_t values = size_t(config.num_layers) * config.num_blocks * config.page_size * kv_cols();
  if (config.int8_activations) {
    keys16 = Buffer<uint16_t>(values);
    values16 = Buffer<uint16_t>(values);
  } else {
    keys32 = Buffer<float>(values);
    values32 = Buffer<float>(values);
  }
  const int tokens = config.max_batch_tokens;
  normed = Activations(tokens, config.hidden_size);
  attended = Activations(tokens, q_cols());
  gated = Activations(tokens, config.intermediate_size);
  last = Activations(std::max(config.max_num_seqs, kMinHeadRows), config.hidden_size);
  for (int i = 0; i < config.num_threads; ++i) private_normed.emplace_back(kPrivateRows, config.hidden_size);
  // Sixteen spare floats: the last group of a row is read and written whole.
  residual = Buffer<float>(size_t(tokens) * config.hidden_size + 16);
  qkv = Buffer<float>(size_t(tokens) * qkv_cols() + 16);
  rotary = Buffer<float>(size_t(tokens) * config.head_dim);
  block_writer.assign(config.num_blocks, -1);
  team = std::make_unique<Team>(config.num_threads);
}

}  // namespace dragoman

using dragoman::Llama;

namespace {

dragoman::Matrix& matrix_at(Llama& model, int layer, int index) {
  if (layer >= 0) return model.layers[layer].matrices[index];
  return index == DRAGOMAN_EMBED ? model.embedding : model.head;
}

// Calls move(page in the cache, page in `data`, bytes) for every page of the blocks, in the order of `data`.
template <typename Move>
void for_each_page(Llama& model, int count, const int32_t* blocks, Move move) {
  const dragoman_llama_config& c = model.config;
  const size_t value_bytes = c.int8_activations ? sizeof(uint16_t) : sizeof(float);
  const size_t page_bytes = size_t(c.page_size) * model.kv_cols() * value_bytes;
  char* caches[] = {c.int8_activations ? reinterpret_cast<char*>(model.keys16.get()) : reinterpret_cast<char*>(model.keys32.get()),
                    c.int8_activations ? reinterpret_cast<char*>(model.values16.get()) : reinterpret_cast<char*>(model.values32.get())};
  size_t at = 0;
  for (int i = 0; i < count; ++i)
    for (int layer = 0; layer < c.num_layers; ++layer)
      for (char* cache : caches) {
        move(cache + (size_t(layer) * c.num_blocks + blocks[i]) * page_bytes, at, page_bytes);
        at += page_bytes;
      }
}

}  // namespace

const char* dragoman_simd_name(void) { return dragoman::simd::kName; }

void* dragoman_llama_create(const dragoman_llama_config* config, const float* inverse_frequencies) {
  try {
    return new Llama(*config, inverse_frequencies);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {  // no thread could be started
    return nullptr;
  }
}

int dragoman_llama_set_matrix(void* handle, int layer, int index, int dtype, int rows, int cols, const void* rows_data) {
  try {
    matrix_at(*static_cast<Llama*>(handle), layer, index) =
        dragoman::pack(dtype, rows, cols, static_cast<const uint8_t*>(rows_data));
    return DRAGOMAN_OK;
  } catch (const std::bad_alloc&) {
    return DRAGOMAN_NO_MEMORY;
  }
}

int dragoman_llama_set_bias(void* handle, int layer, int index, int count, const float* values) {
  dragoman::Matrix& m = matrix_at(*static_cast<Llama*>(handle), layer, index);
  m.bias.assign(size_t(m.groups) * 16, 0.0f);
  for (int i = 0; i < count; ++i) m.bias[i] = values[i];
  return DRAGOMAN_OK;
}

int dragoman_llama_set_vector(void* handle, int layer, int index, int count, const float* values) {
  Llama& model = *static_cast<Llama*>(handle);
  (layer >= 0 ? model.layers[layer].vectors[index] : model.final_norm).assign(values, values + count);
  return DRAGOMAN_OK;
}

int dragoman_llama_run(void* handle, const dragoman_llama_batch* batch, float* logits, float* hidden,
                       dragoman_llama_report* report) {
  Llama& model = *static_cast<Llama*>(handle);
  try {
    if (const int code = dragoman::check_batch(model, *batch, *report)) return code;
    dragoman::run_step(model, *batch, logits, hidden);
    return DRAGOMAN_OK;
  } catch (const std::bad_alloc&) {
    report->code = DRAGOMAN_NO_MEMORY;
    return DRAGOMAN_NO_MEMORY;
  }
}

void dragoman_llama_head(void* handle, int count, const float* hidden, float* logits) {
  dragoman::run_head(*static_cast<Llama*>(handle), count, hidden, logits);
}

int64_t dragoman_llama_block_bytes(void* handle) {
  const Llama& model = *static_cast<Llama*>(handle);
  const dragoman_llama_config& c = model.config;
  return int64_t(2) * c.num_layers * c.page_size * model.kv_cols() * (c.int8_activations ? 2 : 4);
}

void dragoman_llama_read_blocks(void* handle, int count, const int32_t* blocks, void* data) {
  for_each_page(*static_cast<Llama*>(handle), count, blocks, [&](char* page, size_t at, size_t bytes) {
    std::memcpy(static_cast<char*>(data) + at, page, bytes);
  });
}

void dragoman_llama_write_blocks(void* handle, int count, const int32_t* blocks, const void* data) {
  for_each_page(*static_cast<Llama*>(handle), count, blocks, [&](char* page, size_t at, size_t bytes) {
    std::memcpy(page, static_cast<const char*>(data) + at, bytes);
  });
}

void dragoman_llama_destroy(void* handle) { delete static_cast<Llama*>(handle); }
