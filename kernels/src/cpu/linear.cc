#include "cpu.h"
#include "tile.h"
#include "transpose.h"

namespace tl::cpu {
namespace {

constexpr int64_t kPiecesPerThread = 8;  // enough that a thread that comes late still finds its share

// The last panel of an output whose width is no multiple of 16 goes through here, so that no row is overrun.
void ragged_panel(const TileArgs &whole, int64_t rows, int64_t width) {
  alignas(64) float corner[kTileRows * kPanel];
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t height = rows - row < kTileRows ? rows - row : kTileRows;
    TileArgs args = whole;
    args.a += row * whole.a_stride;
    args.c = corner;
    args.c_stride = kPanel;
    tile_rows<1>(height, args);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t column = 0; column < width; ++column)
        whole.c[(row + r) * whole.c_stride + column] = corner[r * kPanel + column];
  }
}

void add_bias(const float *bias, float *out, int64_t rows, int64_t stride, int64_t width) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < width; ++column) out[row * stride + column] += bias[column];
}

struct Linear {
  const float *x, *packed, *bias;
  float *out;
  int64_t rows, inner, columns;

  void panels(int64_t first, int64_t last) const {
    for (int64_t panel = first; panel < last;) {
      const int64_t width = columns - panel * kPanel;
      TileArgs args{x,      inner, packed + panel * kPanel * inner, kPanel, kPanel * inner, out + panel * kPanel,
                    columns, inner, false};
      int64_t taken = 1;
      if (width < kPanel) {
        ragged_panel(args, rows, width);
      } else if (kTilePanels > 1 && panel + kTilePanels <= last && width >= kTilePanels * kPanel) {
        tile_block<kTilePanels>(rows, args);
        taken = kTilePanels;
      } else {
        tile_block<1>(rows, args);
      }
      if (bias != nullptr) {
        const int64_t written = width < taken * kPanel ? width : taken * kPanel;
        add_bias(bias + panel * kPanel, out + panel * kPanel, rows, columns, written);
      }
      panel += taken;
    }
  }
};

}  // namespace

void linear_pack(Pool &pool, const float *weight, float *packed, int64_t rows, int64_t inner, int64_t first_column) {
  const int64_t first_panel = first_column / kPanel, end = first_column + rows;
  pool.run((end + kPanel - 1) / kPanel - first_panel, [=](int64_t piece) {
    const int64_t start = (first_panel + piece) * kPanel, stop = start + kPanel < end ? start + kPanel : end;
    float *panel = packed + start * inner;
    if (start >= first_column && stop == start + kPanel) {
      transpose_panel(weight + (start - first_column) * inner, kPanel, inner, panel);
      return;
    }
    // A panel shared with another weight, or with padding: only this weight's columns are touched.
    for (int64_t column = start < first_column ? first_column : start; column < stop; ++column)
      for (int64_t k = 0; k < inner; ++k)
        panel[k * kPanel + column - start] = weight[(column - first_column) * inner + k];
  });
}

void linear(Pool &pool, const float *x, const float *packed, const float *bias, float *out, int64_t rows,
            int64_t inner, int64_t columns) {
  const Linear job{x, packed, bias, out, rows, inner, columns};
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t groups = (panels + kTilePanels - 1) / kTilePanels;
  const int64_t share = groups / (pool.threads() * kPiecesPerThread);
  const int64_t step = (share > 1 ? share : 1) * kTilePanels;
  pool.run((panels + step - 1) / step, [=](int64_t piece) {
    const int64_t last = (piece + 1) * step < panels ? (piece + 1) * step : panels;
    job.panels(piece * step, last);
  });
}

}  // namespace tl::cpu
