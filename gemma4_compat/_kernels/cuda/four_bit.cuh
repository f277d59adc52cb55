// A 4-bit weight of bitsandbytes, as kernels of products read it. What a format does not have is null.
#pragma once

template <typename T>
struct FourBit {
  const unsigned char* packed;     // two weights in a byte, the first in the high half
  const float* absmax;             // scales; of the scales, if these are quantized
  const unsigned char* quantized;  // scales as numbers of `codes`, before `offset` is added
  const float *codes, *offset;
  const float* values;             // of the 16 numbers; only gemv_4bit is given them
  const typename T::Stored* bias;
  typename T::Stored* output;
  unsigned int outputs, blocks;
};
