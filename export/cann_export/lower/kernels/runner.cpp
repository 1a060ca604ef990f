// Running a compiled graph and talking to other ranks: the class `cann_cpu.GraphRunner` loads an AOTInductor library
// straight from its file and shares the caller's weights; the collectives resolve their group by name at run time.
// torch releases the interpreter lock around custom classes and ops, so that ranks that wait for each other never hold it.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

using at::Tensor;

class GraphRunner : public torch::CustomClassHolder {
 public:
  explicit GraphRunner(const std::string& path) : runner_(path) {}

  // The graph's constants by the names that the exporter gave them, in the order of the graph.
  std::vector<std::string> constants() const {
    std::vector<std::string> names;
    for (const auto& [name, original] : runner_.getConstantNamesToOriginalFQNs()) names.push_back(original);
    return names;
  }

  // Makes the graph use these tensors, without a copy. Every constant must be given.
  void bind(const std::vector<std::string>& names, const std::vector<Tensor>& tensors) {
    TORCH_CHECK(names.size() == tensors.size(), "bind: ", names.size(), " names for ", tensors.size(), " tensors");
    std::unordered_map<std::string, Tensor> given;
    for (size_t i = 0; i < names.size(); i++) given[names[i]] = tensors[i];
    std::unordered_map<std::string, Tensor> buffers;
    for (const auto& [name, original] : runner_.getConstantNamesToOriginalFQNs()) {
      auto it = given.find(original);
      TORCH_CHECK(it != given.end(), "bind: no value for the constant ", original);
      buffers[name] = it->second;
    }
    runner_.update_constant_buffer(buffers, /*use_inactive=*/false, /*validate_full_updates=*/true, /*user_managed=*/true);
    bound_ = tensors;
  }

  std::vector<Tensor> run(std::vector<Tensor> inputs) { return runner_.boxed_run(std::move(inputs)); }

 private:
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
  std::vector<Tensor> bound_;
};

Tensor all_reduce(const Tensor& x, const std::string& group) {
  std::vector<Tensor> values{x.contiguous().clone()};
  c10d::resolve_process_group(group)->allreduce(values)->wait();
  return values[0];
}

Tensor all_gather(const Tensor& x, int64_t size, const std::string& group) {
  Tensor in = x.contiguous();
  auto shape = x.sizes().vec();
  shape[0] *= size;
  Tensor out = at::empty(shape, x.options());
  c10d::resolve_process_group(group)->_allgather_base(out, in)->wait();
  return out;
}

Tensor all_reduce_meta(const Tensor& x, const std::string&) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor all_gather_meta(const Tensor& x, int64_t size, const std::string&) {
  auto shape = x.sym_sizes().vec();
  shape[0] = shape[0] * size;
  return at::empty_symint(shape, x.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cann_cpu, m) {
  m.class_<GraphRunner>("GraphRunner")
      .def(torch::init<const std::string&>())
      .def("constants", &GraphRunner::constants)
      .def("bind", &GraphRunner::bind)
      .def("run", &GraphRunner::run);
}

TORCH_LIBRARY_IMPL(cann_cpu, CPU, m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_gather", all_gather);
}

TORCH_LIBRARY_IMPL(cann_cpu, Meta, m) {
  m.impl("all_reduce", all_reduce_meta);
  m.impl("all_gather", all_gather_meta);
}

extern "C" {

AOTITorchError aoti_torch_cpu_all_reduce(AtenTensorHandle x, const char* group, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(
        all_reduce(*torch::aot_inductor::tensor_handle_to_tensor_pointer(x), group));
  });
}

AOTITorchError aoti_torch_cpu_all_gather(AtenTensorHandle x, int64_t size, const char* group, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(
        all_gather(*torch::aot_inductor::tensor_handle_to_tensor_pointer(x), size, group));
  });
}

}  // extern "C"
