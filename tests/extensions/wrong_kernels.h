#pragma once

// Launchers of wrong_kernels.cu. Each copies `count` bytes, more than none, on `stream`.

#include <cstdint>

struct CUstream_st;

void copy_bytes(const void* from, void* to, int64_t count, CUstream_st* stream);

// In vectors of 16 bytes where there is a whole one, whatever the alignment of `from`.
void copy_vectors(const void* from, void* to, int64_t count, CUstream_st* stream);

// With the blocks along the grid's second dimension, which has 65 535 at most.
void copy_by_grid_y(const void* from, void* to, int64_t count, CUstream_st* stream);

// Reads from[count] too.
void copy_and_look_beyond(const void* from, void* to, int64_t count, CUstream_st* stream);

// Fails: no block has so many threads.
void launch_too_large(CUstream_st* stream);
