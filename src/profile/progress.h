// Shows the progress of a long run: a bar on standard error if that is a terminal, else nothing.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();  // Removes the bar.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(int64_t done, int64_t all);

 private:
  const std::string what_;
  const bool terminal_;
};

}  // namespace sluice
